"""Text of a model or a server on a terminal."""

from __future__ import annotations

CONTROLS = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}
"""Marks that embed, isolate or override a direction (Unicode Standard Annex 9): the text after them would be shown in
another order than it has. Hebrew and Arabic need none."""
REMOVED = dict.fromkeys(CONTROLS | DIRECTIONS)


def visible(text: str) -> str:
    """Returns the text without characters that would let a model change the terminal, or the order of what it shows."""
    return text.translate(REMOVED)
