"""As much of a terminal as the chat uses: text, lines, the cursor moving up, erasing. Colours are dropped."""

from __future__ import annotations

import re

CONTROL = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|([\n\r])|([^\x1b\n\r]+)")


class Screen:
    """lines: the scrollback and the screen. The cursor cannot move above the screen's `height` lines."""

    def __init__(self, height: int = 24, width: int = 80) -> None:
        self.lines = [""]
        self._height, self._width = height, width
        self._row = self._column = 0

    def feed(self, text: str) -> Screen:
        position = 0
        while position < len(text):
            match = CONTROL.match(text, position)
            assert match is not None, text[position:]
            position = match.end()
            number, code, line, words = match.groups()
            if words:
                self._write(words)
            elif line == "\n":
                self._down()
            elif line == "\r":
                self._column = 0
            else:
                self._control(int(number or 0) if number.isdigit() or not number else 0, code)
        return self

    def _write(self, words: str) -> None:
        assert self._column + len(words) <= self._width, "the terminal would wrap the line"
        before = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = before[: self._column] + words + before[self._column + len(words) :]
        self._column += len(words)

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self.lines):
            self.lines.append("")

    def _control(self, number: int, code: str) -> None:
        if code == "A":
            self._row -= number
            assert self._row >= max(len(self.lines) - self._height, 0), "what is above the screen cannot be changed"
        elif code == "K":
            self.lines[self._row] = "" if number == 2 else self.lines[self._row][: self._column]
        elif code == "J":
            self.lines[self._row] = self.lines[self._row][: self._column]
            del self.lines[self._row + 1 :]
        else:
            assert code == "m", code

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def shown(output: str) -> str:
    """What a terminal shows after this output."""
    return Screen(width=1000).feed(output).text
