"""`mlxpaged cache ls | clear DIR` shows and deletes what `serve --prefix-cache-dir DIR` has stored."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.flags import path
from mlxpaged.cli.table import print_table


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        description="Show or delete the prefixes that `mlxpaged serve --prefix-cache-dir DIR` has stored. A server "
        "that uses DIR must be stopped first; POST /v1/cache/clear empties the cache of a running one.",
    )
    verbs = parser.add_subparsers(title="what to do", dest="verb", required=True)
    show = verbs.add_parser("ls", help="show how much each model has")
    clear = verbs.add_parser("clear", help="delete the prefixes of all models, or of one")
    for verb in (show, clear):
        verb.add_argument("directory", type=path, metavar="DIR", help="the directory of --prefix-cache-dir")
        verb.set_defaults(run=run)
    clear.add_argument("model", nargs="?", metavar="MODEL", help="only those of this model, as `cache ls` names it")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 1 with a message if the directory has no prefixes or is in use."""
    from mlxpaged.parts.disk.disk_index import INDEX
    from mlxpaged.parts.disk.disk_store import RANK_DIRECTORY, DiskStore, StoreError

    directory = args.directory
    found = [
        each
        for each in (directory, *sorted(directory.glob(RANK_DIRECTORY.format("*", "*"))))
        if (each / INDEX).is_file()
    ]
    if not found:
        print(f"mlxpaged: {directory} has no prefixes", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        stores = []
        for each in found:
            try:
                stores.append(DiskStore(each, sys.maxsize, 0))
            except StoreError as error:
                print(f"mlxpaged: {error}", file=sys.stderr)
                return 1
            stack.callback(stores[-1].close)
        if args.verb == "clear":
            before = sum(store.stats().size for store in stores)
            blocks = sum(store.clear(args.model).result() for store in stores)
            size = before - sum(store.stats().size for store in stores)
            print(f"{blocks} blocks are deleted, {megabytes(size)}", file=sys.stderr)
        else:
            usage = [each for store in stores for each in store.usage()]
            print_table(
                [("MODEL", "BLOCKS", "SIZE"), *((each.model, str(each.blocks), megabytes(each.size)) for each in usage)]
            )
    return 0
