"""`mlxpaged version` prints the version, as `--version` does."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("version", description="Show the version.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mlxpaged import __version__

    print(f"mlxpaged {__version__}")
    return 0
