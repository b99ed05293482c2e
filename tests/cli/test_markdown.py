"""Markdown while it is written: however it is cut into pieces, the terminal shows it once and whole."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import pytest
from rich.console import Console

from mlxpaged.cli.chat import markdown
from mlxpaged.cli.chat.markdown import MarkdownStream
from tests.cli.screen import Screen

TEXT = """A first paragraph with **bold** text, `code` and an [address](https://example.com/a), which is longer than the
terminal is wide.

# A heading

- one
- two, which is also longer than the terminal, so that it takes two lines
    - three

  a paragraph of the item
1. first
2. second

```python
def f(x):
    return x + 1


print(f(41))
```
Right after the code <b>with a tag</b>.

| name | value |
|------|-------|
| a    | 1     |
| long name | 22222 |

> quoted
---
The end
"""


class Clock:
    """Each look at it takes as long, so that pieces are drawn."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = 0.0
        self._each = seconds

    def __call__(self) -> float:
        self.seconds += self._each
        return self.seconds


def pieces(text: str, seed: int) -> Iterator[str]:
    random_lengths = random.Random(seed)
    while text:
        length = random_lengths.randint(1, 12)
        yield text[:length]
        text = text[length:]


def drawn(parts: Iterator[str], height: int = 30, width: int = 60) -> tuple[str, str]:
    """What the terminal shows, and all that was written to it."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=width, height=height)
    stream = MarkdownStream(console, Clock())
    for part in parts:
        stream.add(part)
    stream.end()
    return Screen(height, width).feed(out.getvalue()).text, out.getvalue()


@pytest.mark.parametrize("seed", range(8))
def test_pieces_come_to_the_same_as_the_whole(seed: int) -> None:
    whole, _ = drawn(iter([TEXT]))
    assert "def f(x):" in whole
    assert "<b>with a tag</b>" in whole
    assert "address (https://example.com/a)" in whole.replace("\n", " ")
    assert drawn(pieces(TEXT, seed))[0] == whole


def test_a_block_longer_than_the_screen_stays_in_the_scrollback() -> None:
    code = "```\n" + "".join(f"line {i}\n" for i in range(100)) + "```\n"
    found, _ = drawn(pieces(code, 1), height=10)
    assert [line.strip() for line in found.split("\n") if line] == [f"line {i}" for i in range(100)]


def test_only_lines_that_change_are_drawn_again() -> None:
    words = " ".join(f"word{i}" for i in range(200))
    whole, written = drawn(pieces(words, 2), height=50)
    assert len(written) < 20 * len(words), "a drawing of all lines each time would write 100 times as much"
    assert "\x1b[J" not in written, "nothing is erased that is not replaced at once"
    assert whole.split() == words.split()


def test_a_slow_drawing_is_done_less_often() -> None:
    now = 0.0
    out = io.StringIO()
    stream = MarkdownStream(Console(file=out, force_terminal=True, width=60), lambda: now)
    for i in range(100):
        now = i * 0.01
        stream.add("word ")
    assert 10 < out.getvalue().count("\n") < 30


def test_control_characters_do_not_reach_the_terminal() -> None:
    found, written = drawn(iter(["a\x1b[2Jb\x07\x9b1A\r\n\nend"]))
    assert found == "a[2Jb1A\n\nend\n"
    assert "\x1b[2J" not in written


def test_marks_of_direction_do_not_reach_the_terminal() -> None:
    found, _ = drawn(iter(["a\u202eb\u2066c\u2069 `\u202dd\u202c` \u200f\u05d0\n\nend"]))
    assert found == "abc d \u200f\u05d0\n\nend\n"


def test_after_the_terminal_has_a_new_width_the_block_is_drawn_below() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=20)
    stream = MarkdownStream(console, Clock())
    stream.add("one two ")
    console.width = 30
    stream.add("three")
    stream.end()
    assert Screen().feed(out.getvalue()).text == "one two\none two three\n"


@pytest.mark.parametrize("text", ["---\n" * 20_000, "[" * 80_000, "# a\n" * 20_000, "word " * 16_000], ids=len)
def test_what_takes_long_to_draw_is_shown_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are the characters that are parsed. Each look at the clock takes half of the time of a drawing."""
    parsed: list[int] = []
    parse = markdown.PARSER.parse
    monkeypatch.setattr(markdown.PARSER, "parse", lambda text: parsed.append(len(text)) or parse(text))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=60, height=20)
    stream = MarkdownStream(console, Clock(markdown.MOST_SECONDS / 2))
    stream.add(text)
    stream.end()
    assert sum(parsed) <= 6 * markdown.PORTION
    assert out.getvalue().endswith(text[-50_000:] + "\n"), "the rest is there, as it was written"
    out.truncate(0)
    stream.add("The next **answer**")
    stream.end()
    assert "**" not in out.getvalue()


def test_a_long_answer_that_is_quickly_drawn_is_drawn_to_its_end() -> None:
    found, _ = drawn(iter([f"{'word ' * 20}\n\n" * 500 + "**the end**"]))
    assert found.rstrip().endswith("\nthe end")
