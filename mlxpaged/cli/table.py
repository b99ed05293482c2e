"""Prints a table on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxpaged.cli.visible import visible


def print_table(rows: Iterable[Sequence[str]]) -> None:
    """rows: the first one has the titles of the columns."""
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
