"""Text of a model or a server on a terminal."""

from __future__ import annotations

CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})


def visible(text: str) -> str:
    """Returns the text without control characters, which would let a model change the terminal."""
    return text.translate(CONTROLS)
