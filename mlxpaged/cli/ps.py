"""`mlxpaged ps` lists the loaded models of the running server: requests, memory, writes to a disk, and API keys."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.connection import add_server_flags, running
from mlxpaged.cli.table import print_table

ABSENT = "-"
SHOWN = ("id", "state", "progress", "kind", "source", "memory_bytes", "running", "waiting", "last_used")
"""Fields of GET /v1/models. progress: None if it is not being loaded."""
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "month_tokens")
"""Fields of a key's usage."""
WRITTEN = ("written_today_bytes", "written_bytes")

Status = dict[str, Any]
"""The answer to GET /v1/status."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ps",
        description="List the loaded models of the running server, with their requests and memory, the bytes that were "
        "written to a disk, and what each API key has used. With --api-keys, the server tells the last two to an admin "
        "key.",
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
        status = status_of(client)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"url": client.url, "models": models} | used(status), indent=2))
        return 0
    print(client.url)
    print_table([("NAME", "STATE", "KIND", "SOURCE", "MEMORY", "RUNNING", "WAITING", "LAST USED"), *map(row, models)])
    for line in writes(status):
        print(line)
    if keys := status.get("keys"):
        print_table([("KEY", "REQUESTS", "PROMPT", "CACHED", "OUTPUT", "THIS MONTH"), *map(key_row, keys)])
    return 0


def status_of(client: Client) -> Status:
    """Returns a status without models if only an admin key may see it. Raises ServerError."""
    try:
        return dict(client.get("/v1/status"))
    except ServerError as error:
        if error.status != 403:
            raise
        return {"models": []}


def used(status: Status) -> dict[str, Any]:
    """Returns what `--json` shows beside the models. keys: None if the server has none, or does not tell."""
    return {name: sum(each[name] for each in written(status)) for name in WRITTEN} | {"keys": status.get("keys")}


def written(status: Status) -> list[dict[str, Any]]:
    """Returns what may be written to a disk: prefixes, by their directories, which models may share, and swap files."""
    tiers = [model["prefix_cache_disk"] for model in status["models"] if model.get("prefix_cache_disk")]
    stores = {tier["directory"]: tier for tier in tiers if tier["directory"]}
    swaps = [model["swap"] for model in status["models"] if model.get("swap", {}).get("written_bytes")]
    return [*stores.values(), *swaps]


def writes(status: Status) -> Iterator[str]:
    """Yields a line with the bytes that were written, if anything may be."""
    if sources := written(status):
        today, total = (megabytes(sum(each[name] for each in sources)) for name in WRITTEN)
        yield f"writes: {today} today, {total} since start"


def key_row(key: dict[str, Any]) -> tuple[str, ...]:
    return key["name"], *(str(key[name]) for name in COUNTS)


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
