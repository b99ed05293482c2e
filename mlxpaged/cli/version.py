"""`mlxpaged version` prints the version, as `--version` does, and the add-ons of other packages."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("version", description="Show the version, and the add-ons of other packages.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mlxpaged import __version__, addons

    print(f"mlxpaged {__version__}")
    for addon in addons.from_outside():
        print(f"add-on {addon.name}: {addon.contents}")
    return 0
