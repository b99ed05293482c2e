"""`mlxpaged ps` lists the loaded models of the running server: requests, memory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import add_server_flags, kind_of, running

ABSENT = "-"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ps",
        description="List the loaded models of the running server, with their requests and memory.",
        epilog="Exit status: 1 if no server runs.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        client = running(args)
        models = loaded_models(client)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"url": client.url, "models": models}, indent=2))
        return 0
    print(client.url)
    rows = [("NAME", "STATE", "KIND", "MEMORY", "RUNNING", "WAITING", "LAST USED"), *map(row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return 0


def loaded_models(client: Client) -> list[dict[str, Any]]:
    """Returns the models that are loaded or are being loaded. What is not known is None: the memory, if the key may not
    read GET /v1/status."""
    try:
        status = client.get("/v1/status")
    except ServerError as error:
        if error.status != 403:
            raise
        status = {}
    details = {each.get("id") or each.get("model"): each for each in status.get("models") or [status]}
    models = []
    for entry in client.get("/v1/models")["data"]:
        state, detail = entry.get("state", "loaded"), details.get(entry["id"], {})
        if state in ("loaded", "loading"):
            models.append(
                {
                    "id": entry["id"],
                    "state": state,
                    "kind": kind_of(entry),
                    "memory_bytes": entry.get("memory_bytes", detail.get("memory_bytes")),
                    "running": entry.get("running", detail.get("running", {}).get("total")),
                    "waiting": entry.get("waiting", detail.get("waiting", {}).get("total")),
                    "last_used": entry.get("last_used"),
                }
            )
    return models


def row(model: dict[str, Any]) -> tuple[str, ...]:
    memory, used = model["memory_bytes"], model["last_used"]
    return (
        model["id"],
        model["state"],
        model["kind"],
        ABSENT if memory is None else f"{memory / 1e9:.1f} GB" if memory >= 1e9 else f"{memory / 1e6:.0f} MB",
        *(ABSENT if model[name] is None else str(model[name]) for name in ("running", "waiting")),
        ABSENT if used is None else ago(time.time() - used),
    )


def ago(seconds: float) -> str:
    """Returns for example "5 min ago"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
