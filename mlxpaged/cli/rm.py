"""`mlxpaged rm MODEL` deletes a model from the local cache of the hub."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.flags import model_name
from mlxpaged.cli.guesses import meant_name
from mlxpaged.models.sources.short_names import full_name


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rm",
        usage="%(prog)s MODEL [--yes]",
        description="Delete a downloaded model, after a question. Directories outside the hub's cache are never "
        "deleted.",
    )
    parser.add_argument(
        "name", type=model_name, metavar="MODEL", help="hub repository or short name, as `mlxpaged ls` shows them"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 1 if nothing was deleted."""
    from mlxpaged.models.sources.downloads import downloads, remove

    name = full_name(args.name)
    found = {download.name: download for download in downloads()}
    if name not in found:
        is_path = os.path.exists(os.path.expanduser(name))  # unlike pathlib's, they take any name
        near = " (rm does not delete directories)" if is_path else meant_name(name, found)
        print(f"mlxpaged: {args.name} is not a downloaded model{near}", file=sys.stderr)
        return 1
    size = megabytes(found[name].bytes)
    if not args.yes and not agreed(f"Delete {name}, {size}? [y/N] "):
        print("nothing was deleted", file=sys.stderr)
        return 1
    remove(name)
    print(f"{name} is deleted, {size}", file=sys.stderr)
    return 0


def agreed(question: str) -> bool:
    """False also without a terminal to ask at."""
    if not sys.stdin.isatty():
        print("mlxpaged: standard input is not a terminal; use --yes", file=sys.stderr)
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
