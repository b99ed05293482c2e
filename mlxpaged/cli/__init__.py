"""The `mlxpaged` command. Each subcommand is a file of this folder, and a line in `main`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mlxpaged import __version__
from mlxpaged.cli import doctor, keys, serve
from mlxpaged.cli.bench import command as bench


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. argv: without the program's name; None: the process's arguments."""
    parser = argparse.ArgumentParser(prog="mlxpaged", description="One model, many clients, one Mac.")
    parser.add_argument("--version", action="version", version=f"mlxpaged {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    serve.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    keys.add_parser(commands)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status
