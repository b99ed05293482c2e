"""Shows on a terminal what is waited for, as one line that is rewritten."""

from __future__ import annotations

import os
from typing import TextIO

from mlxpaged.cli.visible import visible

ERASE = "\x1b[2K"
"""Erases the terminal's line (ECMA-48, EL 2)."""
COLUMNS = 80
"""The width of a terminal that does not say it."""


class StatusLine:
    """Writes nothing if the stream is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""
        self.is_terminal = stream.isatty()

    def show(self, text: str) -> None:
        if not self.is_terminal:
            return
        # A line that the terminal wraps would not be erased as a whole.
        text = visible(text).replace("\n", " ")[: width(self._stream) - 1]
        if text != self._shown:
            self._shown = text
            # The cursor stays at the start of the line: what is written next replaces it.
            self._stream.write(f"{ERASE}{text}\r")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._shown:
            self._shown = ""
            self._stream.write(ERASE)
            self._stream.flush()


def width(stream: TextIO) -> int:
    """Columns of a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except OSError:
        return COLUMNS
