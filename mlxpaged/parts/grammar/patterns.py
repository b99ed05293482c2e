"""Reads the regular expressions of JSON schemas (those of ECMAScript), and writes them for llguidance: for a whole
text, of which they match a part, and in a spelling of its characters. So one expression serves a string in JSON, with
its escapes, and an argument between tags.

Where ECMAScript, Python and Rust differ in what a class has, the characters are those that all of them agree on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlxpaged.parts.grammar.characters import ALL, Characters, both, category, of, others, united
from mlxpaged.parts.grammar.schema_merge import OtherSchemaError

Spelling = Callable[[Characters], str]

MAX_GROUPS = 60
"""Groups in one another. The reader calls itself for each."""


MAX_CHARS = 2**19
"""Most characters that an expression becomes: a class of Unicode has up to 50,000."""
MAX_SHOWN = 60
"""Characters of an expression in an error."""


class OtherPatternError(OtherSchemaError):
    """An expression has what this module does not read: look-around other than look-ahead from the first character, a
    reference to a group, and the like."""


@dataclass(frozen=True)
class Anchor:
    is_start: bool


@dataclass(frozen=True)
class Choice:
    options: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True)
class Repeated:
    """count: a quantifier."""

    item: Item
    count: str


@dataclass(frozen=True)
class Term:
    """is_found: whether the expression must be found in the text, or must not."""

    choice: Choice
    is_found: bool = True


Item = Characters | Anchor | Choice | Repeated

START, END = Anchor(is_start=True), Anchor(is_start=False)
DIGITS = of("0123456789")
WORD = united([*DIGITS, (ord("A"), ord("Z")), *of("_"), (ord("a"), ord("z"))])
SPACE = united([(9, 13), *of(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000"), (0x2000, 0x200A)])
MAYBE_SPACE = united([(0x1C, 0x1F), *of("\x85\u180e\ufeff")])
SHORTHANDS = "dDwWsS"


@functools.lru_cache(maxsize=len(SHORTHANDS))
def shorthand(char: str) -> Characters:
    """The class that a letter after a backslash stands for."""
    if char in "dD":
        return DIGITS if char == "d" else others(category("Nd"))
    if char in "wW":
        return WORD if char == "w" else others(united([*WORD, *category("L"), *category("N"), *category("M")]))
    return SPACE if char == "s" else others(united([*SPACE, *MAYBE_SPACE]))


DOT = others(of("\n\r\u2028\u2029"))
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")
"""Look-around, word boundaries and references to groups, of which llguidance has none."""
LOOK_AHEAD = re.compile(r"\(\?([=!])")
LOOK_AHEAD_AT_START = re.compile(r"\^(?=\(\?[=!])")
QUANTIFIER = re.compile(r"([*+?]|\{\d+(?:,\d*)?\})\??")
GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z_]\w*>)?(?!\?)")
CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
PROPERTY = re.compile(r"([pP])(?:\{([A-Z][a-z]?)\}|([A-Z]))")
CATEGORIES = {"C", "L", "M", "N", "P", "S", "Z"}


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> Choice:
        found = self.choice()
        if self.at < len(self.text):
            raise OtherPatternError("an unopened group")
        return found

    def looks_ahead(self) -> list[Term]:
        """Reads an anchor and the look-ahead after it, as expressions of what begins with the text."""
        found: list[Term] = []
        anchor = LOOK_AHEAD_AT_START.match(self.text)
        self.at = anchor.end() if anchor else 0
        while (begin := LOOK_AHEAD.match(self.text, self.at)) is not None:
            self.at = begin.end()
            inside = self.choice()
            if not self.maybe(")") or QUANTIFIER.match(self.text, self.at):
                raise OtherPatternError("an open group")
            found.append(Term(Choice(tuple((START, *option) for option in inside.options)), begin[1] == "="))
        return found

    def choice(self) -> Choice:
        options = [self.sequence()]
        while self.maybe("|"):
            options.append(self.sequence())
        return Choice(tuple(options))

    def maybe(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def sequence(self) -> tuple[Item, ...]:
        found: list[Item] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            item = self.item()
            if (count := QUANTIFIER.match(self.text, self.at)) is not None:
                self.at = count.end()
                item = Repeated(item, count[1])
                if QUANTIFIER.match(self.text, self.at):
                    raise OtherPatternError("two quantifiers")
            found.append(item)
        return tuple(found)

    def item(self) -> Item:
        char = self.text[self.at]
        if char == "(":
            return self.group()
        if char in "*+?":
            raise OtherPatternError("a quantifier of nothing")
        self.at += 1
        if char == "[":
            return self.char_class()
        if char in "^$":
            return Anchor(char == "^")
        return self.escape() if char == "\\" else DOT if char == "." else of(char)

    def group(self) -> Choice:
        found = GROUP.match(self.text, self.at)
        self.depth += 1
        if found is None or self.depth > MAX_GROUPS:
            raise OtherPatternError("look-around, flags, or too many groups")
        self.at = found.end()
        inside = self.choice()
        if not self.maybe(")"):
            raise OtherPatternError("an open group")
        self.depth -= 1
        return inside

    def char_class(self) -> Characters:
        is_negated = self.maybe("^")
        if self.maybe("]"):
            raise OtherPatternError("an empty class")
        found: list[tuple[int, int]] = []
        while not self.maybe("]"):
            low = self.member()
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self.member()
                if any(len(each) != 1 or each[0][0] != each[0][1] for each in (low, high)) or low > high:
                    raise OtherPatternError("a bad range")
                low = ((low[0][0], high[0][0]),)
            found += low
        return others(united(found)) if is_negated else both(ALL, united(found))

    def member(self) -> Characters:
        if self.at >= len(self.text) or self.text.startswith("[:", self.at):
            raise OtherPatternError("an open class")
        self.at += 1
        char = self.text[self.at - 1]
        if char == "\\" and self.maybe("b"):
            return of("\b")
        return self.escape() if char == "\\" else of(char)

    def escape(self) -> Characters:
        """Reads what is after a backslash."""
        if (found := CODE.match(self.text, self.at)) is not None:
            self.at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code <= 0xDBFF and self.maybe("\\") and (low := CODE.match(self.text, self.at)) and low[2]:
                self.at = low.end()
                code = 0x10000 + ((code - 0xD800) << 10) + int(low[2], 16) - 0xDC00
            characters = both(ALL, ((code, code),))
            if not characters:
                raise OtherPatternError("half of a pair")
            return characters
        if (found := PROPERTY.match(self.text, self.at)) is not None:
            self.at = found.end()
            name = found[2] or found[3]
            if name[0] not in CATEGORIES:
                raise OtherPatternError("an unknown category")
            return category(name) if found[1] == "p" else others(category(name))
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if char and char in SHORTHANDS:
            return shorthand(char)
        if char in CONTROLS and not self.text[self.at : self.at + 1].isdigit():
            return of(CONTROLS[char])
        if char == "c" and self.text[self.at : self.at + 1].isalpha():
            self.at += 1
            return of(chr(ord(self.text[self.at - 1]) % 32))
        if not char or char.isalnum():
            raise OtherPatternError("an escape of another kind")
        return of(char)


@functools.lru_cache(maxsize=16)  # of up to MAX_CHARS each
def whole(pattern: str, spelled: Spelling) -> tuple[tuple[bool, str], ...]:
    """Regular expressions that together say in which texts a part is found that fits `pattern`: each with whether a
    text fits it, or does not. The first one is one that it fits. Raises OtherPatternError."""
    try:
        reader = _Reader(pattern)
        ahead = reader.looks_ahead()
        rest = reader.whole()
        if ahead:
            if len(rest.options) > 1:
                raise OtherPatternError("look-ahead in one of several alternatives")
            rest = Choice(((START, *rest.options[0]),))
        terms = [Term(rest), *ahead]
        return tuple((each.is_found, _choice(each.choice, spelled, begins=True, ends=True)) for each in terms)
    except OtherPatternError as error:
        raise OtherPatternError(f"the pattern {pattern[:MAX_SHOWN]!r} has {error}") from None


def terms(pattern: str, spelled: Spelling, before: str = "", after: str = "") -> list[str]:
    """What `whole` finds, as terms of a terminal in llguidance's notation, which are to be joined by `&`. before,
    after: expressions of what is around the text. Raises OtherPatternError."""
    found = whole(pattern, spelled)
    return [f"{'' if is_found else '~'}{regex(f'{before}{text}{after}')}" for is_found, text in found]


def regex(text: str) -> str:
    """An expression of a terminal. Of llguidance's notation, only the slash needs a backslash."""
    escaped = text.replace("/", "\\/")
    return f"/{escaped}/"


def _choice(choice: Choice, spelled: Spelling, begins: bool, ends: bool) -> str:
    """begins, ends: whether this is the first, or the last, of what must be in the text, so that there may be more text
    before or after it."""
    return f"(?:{'|'.join(_sequence(items, spelled, begins, ends) for items in choice.options)})"


def _sequence(items: tuple[Item, ...], spelled: Spelling, begins: bool, ends: bool) -> str:
    before = after = f"(?:{spelled(ALL)})*"
    while begins and items and items[0] == START:
        items, before = items[1:], ""
    while ends and items and items[-1] == END:
        items, after = items[:-1], ""
    found: list[str] = []
    length = 0
    for number, item in enumerate(items):
        inside = isinstance(item, Choice) and _has_anchor(item)
        first, last = begins and bool(before) and number == 0, ends and bool(after) and number == len(items) - 1
        if inside and first:
            before = ""
        if inside and last:
            after = ""
        found.append(_item(item, spelled, inside and first, inside and last))
        length += len(found[-1])
        if length > MAX_CHARS:
            raise OtherPatternError("too many classes")
    if not items and begins and ends and before and after:
        return before
    return f"{before if begins else ''}{''.join(found)}{after if ends else ''}"


def _item(item: Item, spelled: Spelling, begins: bool, ends: bool) -> str:
    match item:
        case Anchor():
            raise OtherPatternError("an anchor in the middle")
        case Choice():
            return _choice(item, spelled, begins, ends)
        case Repeated():
            return f"(?:{_item(item.item, spelled, begins=False, ends=False)}){item.count}"
        case _:
            if not item:
                raise OtherPatternError("a class of no characters")
            return spelled(item)


def _has_anchor(item: Item) -> bool:
    match item:
        case Choice():
            return any(_has_anchor(each) for option in item.options for each in option)
        case Repeated():
            return _has_anchor(item.item)
        case _:
            return isinstance(item, Anchor)
