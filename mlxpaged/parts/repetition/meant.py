"""Says which repetitions are meant: what the prompt asks for, and data, such as the rows of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

CONSTANT = re.compile(
    r"0[xX][0-9a-fA-F]+|\\[xuU][0-9a-fA-F]+|[0-9a-fA-F]*[0-9][0-9a-fA-F]*|\b(?:[fF]{2}|[fF]{4}|[fF]{8})\b|A{16,}"
    r"|\b(?:[eE]|true|false|null|none|nil|nan|inf|TRUE|FALSE|NULL|True|False|None|NaN|NA)\b"
)
"""Numbers in all bases, characters by their numbers, zeros in base64, and the constants of JSON, C, Python and R."""
PARTS_OF_WORDS = re.compile(r"^\w+|\w+$")
NO_DATA = frozenset("!?\ufffd")
"""Signs that no table and no drawing has. A model whose numbers have overflowed writes nothing but the first."""

WORDS = re.compile(r"^\w+|\w+$")

WORDS = re.compile(r"\w+")
NEAR = 100
"""A number of copies stands at most so many characters before or after what is to be copied."""
NUMBER_OF_COPIES = re.compile(
    r"\b(\d{1,7})\s*(?:x\b|\xd7|(?:times|copies|lines|rows|mal|fois|veces|vezes|volte|keer|раз)\b|次|回|遍|번)"
    r"|(?:\bx|[\xd7*])\s?(\d{1,7})\b",
    re.IGNORECASE,
)
ASKS = re.compile(
    r"\b(?:repeat\w*|times|over and over|again and again|forever|endless\w*|wiederhol\w*|mal|répét\w*|fois|repit\w*"
    r"|repet\w*|veces|vezes|ripet\w*|volte|повтор\w*|раз)\b|重复|重複|繰り返|반복",
    re.IGNORECASE,
)
"""Words with which a prompt asks for copies without a number in digits."""


def is_array(text: str) -> bool:
    """Whether constants of a text are separated by commas, so that they are not all one number."""
    return "," in text


def is_data(text: str) -> bool:
    """Whether copies of a cycle have no words: they are rows of numbers and other constants, rulers, or drawings. At
    both ends, the text may have a part of a constant."""
    rest = CONSTANT.sub("", PARTS_OF_WORDS.sub("", text) or text)
    return bool(text.strip()) and not any(char.isalpha() or char in NO_DATA for char in rest)


def nests(unit: str) -> bool:
    """Whether each copy of a cycle opens or closes another object or list of JSON, so that no two are at the same
    depth."""
    depth = sum(unit.count(opening) - unit.count(closing) for opening, closing in ("{}", "[]"))
    return depth != 0 and '":' in unit


def copies_asked(prompt: str, unit: str) -> float:
    """How many copies of a text the prompt asks for: it has one, which may begin at another place in the cycle, and the
    number or a word that asks for copies near it. Without the number it is math.inf; 0 if it asks for none."""
    return max((copies_near(prompt, place) for place in places_of(prompt, unit)), default=0)


def copies_near(prompt: str, place: tuple[int, int]) -> float:
    start, end = place
    around = prompt[max(0, start - NEAR) : start], prompt[end : end + NEAR]
    numbers = [int(found[1] or found[2]) for text in around for found in NUMBER_OF_COPIES.finditer(text)]
    if numbers:
        return max(numbers)
    return math.inf if any(ASKS.search(text) for text in around) else 0


def places_of(prompt: str, unit: str) -> Iterator[tuple[int, int]]:
    """Yields where the prompt has the words of a cycle, whichever comes first. What stands between words does not
    count, unless there are none."""
    words = [found[0].lower() for found in WORDS.finditer(unit)]
    if not words:
        text = "".join(unit.split())
        yield from (found.span() for found in re.finditer(re.escape(text), prompt) if text)
        return
    turns = {word: [i for i, each in enumerate(words) if each == word] for word in words}
    found = list(WORDS.finditer(prompt))
    said = [each[0].lower() for each in found]
    for start in range(len(said) - len(words) + 1):
        for first in turns.get(said[start], ()):
            if said[start : start + len(words)] == words[first:] + words[:first]:
                yield found[start].start(), found[start + len(words) - 1].end()
