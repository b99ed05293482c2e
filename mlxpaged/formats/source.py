"""The text in which a call is read while the model still writes it.

A reader of a format is a generator: it takes what it needs from a `Source`, and yields when it has to wait for more. It
never sees how the text was cut, because each of its steps waits until the text decides.
"""

from __future__ import annotations

import re
from collections.abc import Container, Generator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when it needs more text, and returns what it has read. Raises NotACall."""

STRUCTURE = re.compile(r'["{}\[\]]')
STRING_PART = re.compile(r'["\\]')
AFTER_SCALAR = re.compile(r"[\s,:\]}\[{\"'<\[]")


class NotACall(Exception):
    """What began like a call is text."""


class Source:
    """text: what the model has written, from where a call may begin. at: what comes before it has been read. ended:
    whether the answer ends with the text. thinking: whether this is in a thought. complete: how many calls were
    complete at which place: if the answer is cut in a later one, these are not lost."""

    def __init__(self, thinking: bool = False, text: str = "") -> None:
        self.text = text
        self.complete: tuple[list[Any], int] = ([], 0)
        self.at = 0
        self.ended = False
        self.thinking = thinking

    def more(self) -> Reading[None]:
        """Waits for more text. Raises NotACall if there is none."""
        if self.ended:
            raise NotACall
        yield

    def keep(self, calls: Sequence[Any]) -> None:
        """Says that these calls are complete here."""
        self.complete = list(calls), self.at

    def literal(self, text: str) -> Reading[None]:
        if not (yield from self.maybe(text)):
            raise NotACall

    def maybe(self, *texts: str) -> Reading[str]:
        """Reads the longest of these texts that comes next. Returns "" if none does."""
        found = yield from self.ahead(*texts)
        self.at += len(found)
        return found

    def ahead(self, *texts: str) -> Reading[str]:
        """Returns the longest of these texts that comes next, or "", and does not read it."""
        while not self.ended and any(
            len(text) > len(self.text) - self.at and text.startswith(self.text[self.at :]) for text in texts
        ):
            yield
        return max((text for text in texts if self.text.startswith(text, self.at)), key=len, default="")

    def space(self) -> Reading[str]:
        """Reads white space."""
        start = self.at
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace():
                self.at += 1
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def is_at_end(self) -> Reading[bool]:
        """Whether the answer ends here."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.at == len(self.text)

    def until(self, *ends: str, most: int | None = None) -> Reading[tuple[str, str]]:
        """Reads to the first of these ends, and the end. Returns both. most: characters before it."""
        start = search = self.at
        while True:
            found = min(
                ((at, -len(end), end) for end in ends if (at := self.text.find(end, search)) >= 0), default=None
            )
            # Where several ends begin alike, the longest counts: wait for it.
            if found is not None and (self.ended or len(self.text) - found[0] >= max(map(len, ends))):
                break
            if found is None:
                search = max(start, len(self.text) - max(map(len, ends)) + 1)
                if most is not None and search - start > most:
                    raise NotACall
            yield from self.more()
        at, _, end = found
        if most is not None and at - start > most:  # as if the text had come in pieces
            raise NotACall
        self.at = at + len(end)
        return self.text[start:at], end

    def before(self, *ends: str, most: int) -> Reading[str]:
        """Reads what comes before the first of these ends, or before the end of the answer."""
        start = self.at
        found = re.compile("|".join(map(re.escape, ends)))
        while (end := found.search(self.text, start)) is None and not self.ended and len(self.text) - start <= most:
            yield
        self.at = end.start() if end else len(self.text)
        if self.at - start > most:
            raise NotACall
        return self.text[start : self.at]

    def rest(self) -> Reading[str]:
        """Waits for the end of the answer. Returns what is left of it, and does not read it."""
        while not self.ended:
            yield
        return self.text[self.at :]

    def has_more_ends(self, begin: str, end: str) -> Reading[bool]:
        """Whether the rest of the answer has more ends of calls than calls: then this was the end of an example."""
        rest = yield from self.rest()
        return rest.count(end) > rest.count(begin)

    def close(self, *ends: str) -> Reading[bool]:
        """Reads white space and a closing tag. It may be cut or missing at the end of the answer. Returns whether the
        call is closed in one of these ways; if not, nothing was read."""
        start = self.at
        yield from self.space()
        if (yield from self.maybe(*ends)):
            return True
        rest = self.text[self.at :]
        if self.ended and any(end.startswith(rest) for end in ends):
            self.at = len(self.text)
            return True
        self.at = start
        return False

    def json(self) -> Reading[str]:
        """Reads a JSON value, as far as its brackets and quotes tell. Returns it as it is written."""
        yield from self.space()
        while self.at == len(self.text):
            yield from self.more()
        start, first = self.at, self.text[self.at]
        if first == '"':
            yield from self._string()
        elif first in "{[":
            depth = 0
            while True:
                mark = yield from self._find(STRUCTURE)
                if mark == '"':
                    self.at -= 1
                    yield from self._string()
                    continue
                depth += 1 if mark in "{[" else -1
                if depth == 0:
                    break
        else:
            while (end := AFTER_SCALAR.search(self.text, self.at)) is None and not self.ended:
                self.at = len(self.text)
                yield
            self.at = end.start() if end else len(self.text)
        return self.text[start : self.at]

    def _string(self) -> Reading[None]:
        self.at += 1
        while (yield from self._find(STRING_PART)) != '"':
            while self.at == len(self.text):
                yield from self.more()
            self.at += 1  # the character after the backslash

    def _find(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads to a character that matches, and the character."""
        while (found := pattern.search(self.text, self.at)) is None:
            self.at = len(self.text)
            yield from self.more()
        self.at = found.end()
        return found[0]

    def members(self, keys: Container[str] | None = None) -> Reading[list[tuple[str, str]]]:
        """Reads a JSON object. Returns its keys, and its values as they are written. keys: those that it may have."""
        yield from self.space()
        yield from self.literal("{")
        found: list[tuple[str, str]] = []
        yield from self.space()
        if (yield from self.maybe("}")):
            return found
        while True:
            yield from self.space()
            if not (yield from self.ahead('"')):
                raise NotACall
            key = yield from self.json()
            yield from self.space()
            yield from self.literal(":")
            if keys is not None and key[1:-1] not in keys:
                raise NotACall
            found.append((key[1:-1], (yield from self.json())))
            yield from self.space()
            if (yield from self.maybe("}")):
                return found
            yield from self.literal(",")
