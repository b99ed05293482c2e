"""Calls with a tag around each argument. A value is written as it is: without quotes, and without escapes.

So a value may contain what ends it. Which end is meant? The first one after which the call goes on as the format says:
another argument of the tool that has not come yet, or the end of the call. A value may even contain whole calls: then
the answer has more ends of calls than calls after it. So a call is only complete when the answer is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mlxpaged.formats.pieces import Either, Listed, Piece, Raw, argument, properties, without_null
from mlxpaged.formats.schemas import Schema, as_string, loads, types_of
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

MAX_NAME = 256
"""Characters of a name, a key, or a tag's attributes."""


CDATA = "<![CDATA["


def separated(*tags: str) -> tuple[Raw, ...]:
    """Tags, each with a line feed before it or without: what models of a format write differs in that."""
    return tuple(Raw(tag, ("", "\n")) for tag in tags if tag)


NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Markup:
    """The tags of a format.

    opening, closing: around all calls of a section, or around each call; empty if there are none. call: before and
    after a tool's name. end: of a call; empty if `closing` ends it. key: before and after an argument's key. value:
    between the key's tag and the value, after white space; empty if there is nothing. value_end: may have "{key}".
    line_feeds: whether one line feed at each end of the value belongs to the tags. bare_name: whether the name ends at
    the first key, or at the end of the call. cdata: whether a value may be a CDATA section.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    call: tuple[str, str]
    end: str
    key: tuple[str, str]
    value_end: str
    value: str = ""
    line_feeds: bool = False
    bare_name: bool = False
    cdata: bool = False
    is_told: bool = False
    """Whether the tag of a key says whether the value is a string."""
    write_name: Callable[[str], str] = str
    write_key: Callable[[str, str], str] = lambda key, kind: key
    """Writes what `typed` reads. The other argument: the type of the value."""
    named: Callable[[str], str] = lambda written: written.strip().strip("\"'")
    """Finds the tool's name in what is written in its place."""
    typed: Callable[[str], tuple[str, bool | None]] = lambda key: (key, None)
    """Divides what is in a key's tag: the key, and whether the value is a string, if the tag says that."""

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.opening, self.call[0])))

    def written(self, name: str, schema: Schema | None) -> tuple[Piece, ...]:
        """Does what `Format.written` does. Raises InexpressibleError."""
        call = f"{self.call[0]}{self.write_name(name)}{self.call[1]}"
        begin = separated(call) if self.opening else (call.removeprefix(self.call[0]),)
        end = separated(self.end, *self.closing[:1])
        if schema is None:
            last, *others = filter(None, (self.end, *self.closing[:1]))
            return (*begin, Raw(last), *separated(*others))
        items = []
        for key, (each, must) in properties(schema).items():
            value_end = self.value_end.format(key=key)
            around = ("\n", f"\n{value_end}") if self.line_feeds else ("", value_end)
            text = without_null(each, schema) if self.is_told else None
            is_string, value = argument(each if text is None else text, schema, around[1], self.is_told)
            if is_string and self.cdata:
                around = CDATA, f"]]>{value_end}"
                is_string, value = argument(each, schema, around[1])
            kinds = sorted((types_of(each, schema) or {"object"}) - {"null"}) or ["null"]
            kind = "string" if is_string else kinds[0]
            written = (*self._before(key, kind), *filter(None, around[:1]), *value)
            if text is not None:
                written = (Either((written, (*self._before(key, "null"), f"null{value_end}"))),)
            items.append((must, written))
        return (*begin, Listed(tuple(items)), *end)

    def _before(self, key: str, kind: str) -> tuple[Raw, ...]:
        """Returns what is before a value of this type."""
        return separated(f"{self.key[0]}{self.write_key(key, kind)}{self.key[1]}", self.value)

    def read(self, source: Source, tools: Tools) -> Reading[list[Call]]:
        """Reads the calls of a section. If one is broken, the section is text. If it is not opened, they must fit."""
        opened = not self.opening or bool((yield from source.maybe(*self.opening)))
        yield from source.space()
        calls: list[Call] = []
        while True:
            calls.append((yield from self._call(source, tools)))
            source.keep(calls)
            if (yield from source.close(*self.closing)):
                break
            yield from source.space()
            if not self.call[0] or not (yield from source.ahead(self.call[0])):
                source.at = source.complete[1]
                break
        if not opened and not all(map(tools.fit, calls)):
            raise NotACall
        return calls

    def _call(self, source: Source, tools: Tools) -> Reading[Call]:
        if self.call[0]:
            yield from source.literal(self.call[0])
        if self.bare_name:
            name = yield from source.before(self.key[0], *self.closing, "\n", most=MAX_NAME)
        else:
            name, _ = yield from source.until(self.call[1], most=MAX_NAME)
        name = self.named(name)
        tools.schema(name)  # it is no call if there is no such tool
        arguments: dict[str, str] = {}
        while True:
            yield from source.space()
            if (yield from self._ends(source)):
                return tools.call_of(name, arguments)
            yield from source.literal(self.key[0])
            written, _ = yield from source.until(self.key[1], most=MAX_NAME)
            key, is_string = self.typed(written)
            keys = tools.keys(name)
            if key in arguments or "<" in key or "\n" in key or (keys is not None and key not in keys):
                raise NotACall
            if self.value:
                yield from source.space()
                yield from source.literal(self.value)
            text = yield from self._value(source, tools, name, key, {*arguments, key})
            if self.line_feeds:
                text = text[1:] if text.startswith("\n") else text
                text = text[:-1] if text.endswith("\n") else text
            arguments[key] = tools.argument(name, key, text) if is_string is None else typed(text, is_string)

    def _ends(self, source: Source) -> Reading[bool]:
        """Reads the end of a call. Without a tag for it, the closing tag of the section is ahead."""
        if self.end:
            return bool((yield from source.maybe(self.end)))
        start = source.at
        closed = yield from source.close(*self.closing)
        source.at = start
        return closed

    def _value(self, source: Source, tools: Tools, name: str, key: str, known: set[str]) -> Reading[str]:
        tag = self.value_end.format(key=key)
        if self.cdata and (yield from source.maybe(CDATA)):
            tag = f"]]>{tag}"
        start = source.at
        while True:
            yield from source.until(tag)
            end, after = source.at - len(tag), source.at
            if (yield from self._goes_on(source, tools, name, known)):
                source.at = after
                return source.text[start:end]
            source.at = end + 1

    def _goes_on(self, source: Source, tools: Tools, name: str, known: set[str]) -> Reading[bool]:
        """Whether the call goes on here as it must after a value."""
        yield from source.space()
        if self.end and (yield from source.maybe(self.end)):
            return (yield from self._is_left(source))
        if (yield from source.maybe(self.key[0])):
            try:
                written, _ = yield from source.until(self.key[1], most=MAX_NAME)
            except NotACall:
                return False
            key, keys = self.typed(written)[0], tools.keys(name)
            if keys is not None and key not in keys and NAME.fullmatch(key):
                raise NotACall  # the text does not tell whether the model invents a key, or writes about one
            return key not in known and "\n" not in key and (keys is None or key in keys)
        return not self.end and (yield from self._is_left(source))

    def _is_left(self, source: Source) -> Reading[bool]:
        """Whether a call ends here: with the tag that closes it, with another call, or with the answer."""
        closed = not self.closing or (yield from source.close(*self.closing))
        if source.thinking:
            yield from source.space()
            if (yield from source.is_at_end()) or (yield from source.ahead(*self.starts)):
                return True
            raise NotACall  # the thought goes on
        rest = yield from source.rest()
        if not closed and rest.strip() and not rest.lstrip().startswith(self.starts):
            return False
        begin, end = (self.call[0], self.end) if self.end else (self.opening[0], self.closing[0])
        if (yield from source.has_more_ends(begin, end)):
            return False  # the value goes on
        if (yield from source.has_more_ends(self.key[0], self.value_end)):
            raise NotACall  # the text does not tell whether it does
        return True


def typed(text: str, is_string: bool) -> str:
    """Returns the JSON of a value whose tag says whether it is a string."""
    if is_string:
        return as_string(text)
    loads(text)
    return text.strip()
