"""The flags of `mlxpaged keys`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mlxpaged.api.access.key_names import NAME_PATTERN, TIERS
from mlxpaged.cli.flags import Flags, fitting, one_of, path, positive_int
from mlxpaged.cli.parser import heavy_imports

key_name = fitting(str, "1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'", re.compile(NAME_PATTERN).fullmatch)
DEFAULT_PATH = Path.home() / ".mlxpaged" / "api_keys.json"


def model_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        description="Make, list and remove API keys. A running server follows changes of the file within a second.",
    )
    verbs = parser.add_subparsers(title="what to do", dest="verb", required=True)
    add = verbs.add_parser("add", help="make a key and print it once")
    add.add_argument("name", type=key_name, metavar="NAME", help="name of the key: 1 to 64 of A-Z a-z 0-9 . _ -")
    add.add_argument("--tier", type=one_of(*TIERS), default="normal", help="priority of its requests (default normal)")
    highest = 'highest priority that service_tier "priority" gives (default: the tier)'
    add.add_argument("--max-priority", type=one_of(*TIERS), help=highest)
    for flag, counted in (("--rate-limit", "requests"), ("--token-limit", "tokens")):
        limit = f"{counted} per minute (default: no limit)"
        add.add_argument(flag, type=positive_int, metavar="N", help=limit, dest=f"{counted}_per_minute")
    names = "names of the models that it may use, with commas between them (default: all)"
    add.add_argument("--models", type=model_names, metavar="NAME[,NAME...]", help=names)
    add.add_argument("--admin", action="store_true", help="may also see and end the requests of all keys")
    add.add_argument("--metrics", action="store_true", help="may also read /metrics, as an admin key may")
    show = verbs.add_parser("list", help="show the names, the settings and the usage of the keys")
    show.add_argument("--json", action="store_true", help="print JSON, with requests, cached tokens and the month")
    remove = verbs.add_parser("remove", help="revoke a key")
    remove.add_argument("name", metavar="NAME")
    for verb in (add, show, remove):
        Flags(verb).value("--api-keys", path, DEFAULT_PATH, "file of the keys")
        verb.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with heavy_imports():
        from mlxpaged.cli.keys.command import run
    return run(args)
