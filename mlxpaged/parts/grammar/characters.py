"""Sets of characters, and the regular expressions of one of them: as it is, or in a string of JSON, where RFC 8259
gives it several spellings."""

from __future__ import annotations

import functools
import itertools
import sys
import unicodedata
from collections.abc import Callable, Iterable

Characters = tuple[tuple[int, int], ...]
"""Code points, as ranges with both ends, in order and apart from each other."""

Digit = Callable[[int, int, int], str]
"""Writes the digits from one to another at a place, the last place being 1."""

SHORT = {'"': '"', "\\": "\\\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""What is after the backslash of a short escape, in a regular expression."""
PLAIN_TEXT = "".join(char for char in map(chr, range(32, 127)) if char not in "\"\\/<>&'+=`")
"""Characters that no program escapes. Some escape those of HTML."""


def united(ranges: Iterable[tuple[int, int]]) -> Characters:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return tuple(found)


def of(text: str) -> Characters:
    return united((ord(char), ord(char)) for char in text)


def both(some: Characters, others: Characters) -> Characters:
    """The characters of both sets."""
    met = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return united((low, high) for low, high in met if low <= high)


def others(characters: Characters) -> Characters:
    """All characters that are not in a set."""
    edges = [-1, *itertools.chain(*characters), sys.maxunicode + 1]
    gaps = ((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True))
    return both(ALL, tuple((low, high) for low, high in gaps if low <= high))


ALL: Characters = ((0, 0xD7FF), (0xE000, sys.maxunicode))
"""All but the halves of surrogate pairs."""
QUOTED = others(united([(0, 0x1F), *of('"\\')]))
"""The characters that a string of JSON may have as they are."""
PLAIN = of(PLAIN_TEXT)
SMALL_CLASS = 8
"""Ranges of a class that becomes less than a kilobyte."""


@functools.lru_cache(maxsize=64)
def category(name: str) -> Characters:
    """The characters whose general category begins with `name`."""
    return united(each for key, ranges in _categories().items() if key.startswith(name) for each in ranges)


@functools.lru_cache(maxsize=1)
def _categories() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for low, high in ALL:
        for name, codes in itertools.groupby(range(low, high + 1), lambda code: unicodedata.category(chr(code))):
            group = list(codes)
            found.setdefault(name, []).append((group[0], group[-1]))
    return found


def kept(function: Callable[[Characters], str]) -> Callable[[Characters], str]:
    """Keeps the latest results. A class of Unicode becomes 40 kB, so few of large classes are kept."""
    of_small = functools.lru_cache(maxsize=1024)(function)
    of_large = functools.lru_cache(maxsize=16)(function)

    @functools.wraps(function)
    def found(characters: Characters) -> str:
        return (of_small if len(characters) <= SMALL_CLASS else of_large)(characters)

    return found


def as_it_is(characters: Characters) -> str:
    """A regular expression for one of these characters."""
    if characters == ALL:
        return "(?s:.)"
    if len(characters) == 1 and characters[0][0] == characters[0][1]:
        return _char(characters[0][0])
    ranges = (_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in characters)
    return f"[{''.join(ranges)}]"


def _char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"


@kept
def in_json(characters: Characters) -> str:
    """The same in a string of JSON: as it is, in a short escape, or in one or two of four digits. Halves of pairs are
    not allowed without the other half: they are no text."""
    as_they_are = both(characters, QUOTED)
    short = "".join(SHORT[char] for char in SHORT if both(characters, of(char)))
    low = (_unit(*each) for each in both(characters, ((0, 0xFFFF),)))
    high = (_pair(*each) for each in both(characters, ((0x10000, sys.maxunicode),)))
    escapes = [*([f"[{short}]"] if short else []), *low, *high]
    found = [*([as_it_is(as_they_are)] if as_they_are else []), rf"\\(?:{'|'.join(escapes)})"]
    return f"(?:{'|'.join(found)})"


def spelled(text: str) -> str:
    """A regular expression for a listed text in JSON. Its plain characters are written as they are: if there is no
    choice, the text is forced, in one step."""
    return "".join((as_it_is if is_plain(char) else in_json)(of(char)) for char in text)


@kept
def in_key(characters: Characters) -> str:
    """The same as `in_json` for a key beside listed ones. It has no spelling that those lack, so that it can be told
    from them."""
    plain, rest = both(characters, PLAIN), both(characters, others(PLAIN))
    found = [*([as_it_is(plain)] if plain else []), *([in_json(rest)] if rest else [])]
    return f"(?:{'|'.join(found)})"


def is_plain(text: str) -> bool:
    """Whether no program escapes a character of the text in JSON."""
    return all(char in PLAIN_TEXT for char in text)


def _unit(low: int, high: int) -> str:
    return f"u(?:{'|'.join(numbers(low, high, 4, 16, _hex_digit))})"


def _pair(low: int, high: int) -> str:
    """Each half is a digit of base 1,024."""

    def half(place: int, low: int, high: int) -> str:
        return _unit(0xD800 + low, 0xD800 + high) if place == 2 else rf"\\{_unit(0xDC00 + low, 0xDC00 + high)}"

    return f"(?:{'|'.join(numbers(low - 0x10000, high - 0x10000, 2, 0x400, half))})"


def _hex_digit(_: int, low: int, high: int) -> str:
    digits = "".join(f"{digit:x}" for digit in range(low, high + 1))
    both_cases = digits + "".join(filter(str.isupper, digits.upper()))
    return both_cases if len(both_cases) == 1 else f"[{both_cases}]"


def numbers(low: int, high: int, places: int, base: int, digit: Digit) -> list[str]:
    """Regular expressions for the numbers from `low` to `high`, with so many digits."""
    if not places:
        return [""]
    size = base ** (places - 1)
    first, last = low // size, high // size

    def part(first: int, low: int, high: int) -> list[str]:
        return [digit(places, first, first) + rest for rest in numbers(low, high, places - 1, base, digit)]

    if first == last:
        return part(first, low % size, high % size)
    begin, end = [], []
    if low % size:
        begin = part(first, low % size, size - 1)
        first += 1
    if high % size != size - 1:
        end = part(last, 0, high % size)
        last -= 1
    all_of = "".join(digit(place, 0, base - 1) for place in range(places - 1, 0, -1))
    return begin + ([digit(places, first, last) + all_of] if first <= last else []) + end
