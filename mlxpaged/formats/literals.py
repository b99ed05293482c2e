"""Values as they are written in other notations than JSON: in Python's, and in Gemma's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mlxpaged.formats.schemas import Schema, as_string, fits, items_of, loads, member, types_of
from mlxpaged.formats.source import NotACall, Reading, Source

CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}
NOTHING: Schema = {}
HEX = {"x": 2, "u": 4, "U": 8}
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""The halves of a character that JSON writes as two escapes."""
MAX_DEPTH = 60
MAX_WORD = 400
"""Characters of a number, a constant, or a key."""


@dataclass(frozen=True)
class Notation:
    """quote: a tag at both ends of a string, in which nothing is escaped; empty if strings are Python's. bare_keys:
    whether keys of objects have no quotes. Then a word without quotes is a string if the schema says so."""

    quote: str = ""
    bare_keys: bool = False

    def value(self, source: Source, depth: int = 0, schema: Any = None, root: Schema = NOTHING) -> Reading[str]:
        """Reads a value. Returns it as JSON. schema: of the value, within `root`; None if it is not known."""
        if depth > MAX_DEPTH:
            raise NotACall
        yield from source.space()
        if self.quote and (yield from source.maybe(self.quote)):
            return as_string((yield from self._quoted(source)))
        first = yield from source.maybe("{", "[", "(", '"', "'")
        if first == "{":
            return (yield from self.object(source, depth, schema, root))
        if first in ("[", "("):
            return (yield from self._list(source, "]" if first == "[" else ")", depth, schema, root))
        if first:
            return as_string((yield from string(source, first)))
        word = (yield from source.before(",", "}", "]", ")", "\n", most=MAX_WORD)).strip()
        written = CONSTANTS.get(word, word if NUMBER.match(word) else "")
        types = types_of(schema, root) if self.bare_keys else None
        if types is None or "string" not in types or (written and fits(loads(written), {"type": [*types]}, NOTHING)):
            if not written:
                raise NotACall
            return written
        if not word or any(mark in word for mark in "<{["):
            raise NotACall
        return as_string(word)

    def object(self, source: Source, depth: int = 0, schema: Any = None, root: Schema = NOTHING) -> Reading[str]:
        """Reads an object from after its bracket. Returns it as JSON."""
        found: dict[str, str] = {}
        while True:
            yield from source.space()
            if (yield from source.maybe("}")):
                return f"{{{', '.join(f'{key}: {value}' for key, value in found.items())}}}"
            if found:
                yield from source.literal(",")
                yield from source.space()
            key = yield from self._key(source)
            yield from source.space()
            yield from source.literal(":")
            if key in found:
                raise NotACall
            found[key] = yield from self.value(source, depth + 1, member(schema, loads(key), root), root)

    def _key(self, source: Source) -> Reading[str]:
        if self.quote and (yield from source.maybe(self.quote)):
            text, _ = yield from source.until(self.quote, most=MAX_WORD)
            return as_string(text)
        if quote := (yield from source.maybe('"', "'")):
            return as_string((yield from string(source, quote)))
        if not self.bare_keys:
            raise NotACall
        key = (yield from source.before(":", "{", "}", ",", "\n", most=MAX_WORD)).strip()
        if not key or "<" in key:
            raise NotACall
        return as_string(key)

    def _list(self, source: Source, end: str, depth: int, schema: Any, root: Schema) -> Reading[str]:
        found: list[str] = []
        items = items_of(schema, root)
        while True:
            yield from source.space()
            if (yield from source.maybe(end)):
                return f"[{', '.join(found)}]"
            if found:
                yield from source.literal(",")
                yield from source.space()
                if (yield from source.maybe(end)):
                    return f"[{', '.join(found)}]"
            found.append((yield from self.value(source, depth + 1, items, root)))

    def _quoted(self, source: Source) -> Reading[str]:
        """Reads a string between tags. A tag in the middle of it, after which the object does not go on, is a quotation
        mark: Gemma writes some as tags."""
        text = ""
        while True:
            part, _ = yield from source.until(self.quote)
            if (yield from self._ends(source)):
                return text + part
            text += part + '"'

    def _ends(self, source: Source) -> Reading[bool]:
        start = source.at
        try:
            yield from source.space()
            if not (yield from source.maybe(",")):
                return bool((yield from source.maybe("}", "]")))
            yield from source.space()
            if (yield from source.ahead(self.quote, '"', "{", "[", "}", "]")):
                return True
            word = yield from source.before(":", ",", "]", "}", "\n", self.quote, most=MAX_WORD)
            return (yield from source.ahead(":", ",", "]", "}")) == ":" or bool(NUMBER.match(word.strip()))
        except NotACall:
            return False
        finally:
            source.at = start


def string(source: Source, quote: str) -> Reading[str]:
    """Reads a string of Python or JSON from after its first quotation mark."""
    if (yield from source.maybe(quote * 2)):
        quote *= 3
        if len(quote) == 3 and not (yield from source.maybe(quote[0])):
            return ""
    text = ""
    while True:
        part, end = yield from source.until(quote, "\\")
        text += part
        if end == quote:
            return PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
        while source.at == len(source.text):
            yield from source.more()
        code = source.text[source.at]
        source.at += 1
        if code in HEX:
            while len(source.text) < source.at + HEX[code]:
                yield from source.more()
            digits, source.at = source.text[source.at : source.at + HEX[code]], source.at + HEX[code]
            try:
                text += chr(int(digits, 16))
            except (ValueError, OverflowError):
                raise NotACall from None
        else:
            text += ESCAPES.get(code, f"\\{code}")


PYTHON = Notation()
