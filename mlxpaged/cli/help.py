"""`mlxpaged help [COMMAND]` prints the help, as `--help` does."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    shown = "show the help of a command"  # without a command too, this parser prints the list that it is in
    parser = commands.add_parser("help", help=shown, description="Show the help of a command, or the list of commands.")
    parser.add_argument("of", nargs="*", metavar="COMMAND", help="for example serve, or keys add")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mlxpaged import cli  # it imports this module

    return cli.main([*args.of, "--help"])
