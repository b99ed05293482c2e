"""Shows Markdown on a terminal while it is written.

Blocks that are complete are printed once and stay, so the terminal's scrollback has the whole answer. The last block is
drawn again as it grows: only the lines that change, and never more of them than the screen has.

What a model writes may take long to draw: a megabyte of small blocks, or one block that does not end. After
MOST_SECONDS at a time, the rest of the answer is shown as it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown

from mlxpaged.cli.visible import visible

UP, ERASE_LINE, ERASE_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
"""Control sequences of ECMA-48: cursor up; erase to the end of the line, and of the screen."""

LEAST_SECONDS = 0.05
"""Seconds between two drawings."""
DRAWING_SHARE = 0.1
"""The largest share of the time that goes into drawing: a long block takes longer, so it is drawn less often."""
MOST_SECONDS = 2.0
"""Seconds of one drawing. A block of code of 100 kB takes one."""
PORTION = 8192
"""Characters that are drawn before the time is checked again. The slowest take 0.06 ms each."""


class PlainHeading(Heading):
    """rich draws a box around headings of the first level and centers the others."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
"""HTML is text, which rich would leave out."""


class Answer(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": PlainHeading}

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)  # the terminal's own colours
        self.parsed = PARSER.parse(text)


class MarkdownStream:
    """clock: seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._new = ""  # the text that is not drawn
        self._block = ""  # the text before it that is not complete
        self._printed = 0  # lines of the block that are above the screen's part that is drawn again
        self._drawn: list[str] = []
        self._is_first = True
        self._is_plain = False  # the rest of the answer is shown as it is
        self._width = console.width
        self._next = 0.0

    def add(self, text: str) -> None:
        self._new += visible(text)
        if self._clock() >= self._next:
            start = self._clock()
            self._advance(start + MOST_SECONDS)
            self._next = max(start + LEAST_SECONDS, self._clock() + (self._clock() - start) / DRAWING_SHARE)

    def end(self) -> None:
        """Draw what is left."""
        self._advance(self._clock() + MOST_SECONDS)
        if self._is_plain:
            self._write("\n")
        self._block, self._printed, self._drawn, self._is_first, self._is_plain = "", 0, [], True, False

    def _advance(self, until: float) -> None:
        """Draw the new text, or show it as it is from then on."""
        while self._new and not self._is_plain:
            self._block, self._new = self._block + self._new[:PORTION], self._new[PORTION:]
            self._draw()
            self._is_plain = self._clock() >= until
        self._write(self._new)
        self._new = ""

    def _draw(self) -> None:
        complete, self._block = self._split(self._block)
        for block in complete:
            self._redraw(self._lines(block))
            self._printed, self._drawn, self._is_first = 0, [], False
        if self._block.strip():
            self._redraw(self._lines(self._block))

    def _split(self, text: str) -> tuple[list[str], str]:
        """Returns the blocks before the last one, which may still grow, and the last one. A block begins with a whole
        line: half a line may still become a part of the block before."""
        lines, whole = text.split("\n"), text.count("\n")
        starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
        starts = [start for start in starts if start < whole] or [0]
        blocks = ["\n".join(lines[start:end]) for start, end in pairwise(starts)]
        return blocks, "\n".join(lines[starts[-1] :])

    def _lines(self, block: str) -> list[str]:
        """Returns the rendered lines of a block. An empty line is between two blocks."""
        with self._console.capture() as captured:
            self._console.print(Answer(block))
        lines = [line.rstrip(" ") for line in captured.get().split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            lines.pop(0)
        return lines if self._is_first else ["", *lines]

    def _redraw(self, lines: list[str]) -> None:
        """Draw the lines in place of those drawn before. Those that the screen has no room for are printed for good."""
        if self._console.width != self._width:  # the terminal has moved the lines: begin below them
            self._width, self._printed, self._drawn = self._console.width, 0, []
        room = max(self._console.height - 2, 1)
        kept = self._printed
        self._printed = max(kept, len(lines) - room)
        shown = lines[kept:]
        same = next(
            (i for i, pair in enumerate(zip(self._drawn, shown, strict=False)) if pair[0] != pair[1]),
            min(len(self._drawn), len(shown)),
        )
        up = len(self._drawn) - same
        text = UP.format(up) if up else ""
        # Erase before the text: after a line as wide as the terminal, the cursor is still on its last letter.
        text += "".join(f"{ERASE_LINE}{line}\n" for line in shown[same:])
        text += ERASE_BELOW if len(shown) < len(self._drawn) else ""
        self._drawn = lines[self._printed :]
        self._write(text)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
