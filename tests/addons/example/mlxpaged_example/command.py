"""`mlxpaged hello` greets."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("hello", description="Greet.")
    parser.add_argument("name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(f"hello {args.name}")
    return 0
