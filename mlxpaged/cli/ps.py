"""`mlxpaged ps` lists the loaded models of the running server: requests, memory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import add_server_flags, running
from mlxpaged.cli.table import print_table

ABSENT = "-"
SHOWN = ("id", "state", "progress", "kind", "source", "memory_bytes", "running", "waiting", "last_used")
"""Fields of GET /v1/models. progress: None if it is not being loaded."""


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
    print_table([("NAME", "STATE", "KIND", "SOURCE", "MEMORY", "RUNNING", "WAITING", "LAST USED"), *map(row, models)])
    return 0


def loaded_models(client: Client) -> list[dict[str, Any]]:
    """Returns the models that are loaded or are being loaded. What is not known is None."""
    entries = client.get("/v1/models")["data"]
    return [{name: entry.get(name) for name in SHOWN} for entry in entries if entry["state"] in ("loaded", "loading")]


def row(model: dict[str, Any]) -> tuple[str, ...]:
    memory, used = model["memory_bytes"], model["last_used"]
    return (
        model["id"],
        model["progress"] or model["state"],
        model["kind"],
        model["source"] or ABSENT,
        ABSENT if memory is None else megabytes(memory),
        *(ABSENT if model[name] is None else str(model[name]) for name in ("running", "waiting")),
        ABSENT if used is None else ago(time.time() - used),
    )


def ago(seconds: float) -> str:
    """Returns for example "5 min ago"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
