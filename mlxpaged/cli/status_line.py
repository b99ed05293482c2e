"""Shows on a terminal what is waited for, as one line that is rewritten."""

from __future__ import annotations

from typing import TextIO

ERASE = "\x1b[2K"
"""Erases the terminal's line (ECMA-48, EL 2)."""


class StatusLine:
    """Writes nothing if the stream is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = ""
        self.is_terminal = stream.isatty()

    def show(self, text: str) -> None:
        if self.is_terminal and text != self._shown:
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
