"""Reads tool calls from the text between their tags. mlx-lm's parser decides whether they are calls. If a format writes
arguments as JSON after the name, they are passed on before the call is complete."""

from __future__ import annotations

import copy
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mlxpaged.api.generation.deltas import CallArguments, CallBroken, CallEnd, CallStart, Delta, Text
from mlxpaged.models import ToolFormat

HEADERS = {
    "json_tools": re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)'),
    "mistral": re.compile(r"\s*([\w-]+)\s*\[ARGS\]\s*(?=\{)"),
}
"""Patterns by format of the text up to the arguments, with the call's name. Other formats are read after their end."""

AROUND_ARGUMENTS = {"json_tools": ('\n{{"name": "{}", "arguments": ', "}\n"), "mistral": ("{}[ARGS]", "")}
"""By format, the text between a call's opening tag and its arguments, with the name in it, and the text between the
arguments and the closing tag. Only these formats can be enforced: in others, arguments are not JSON."""

CALL_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


class CallReader:
    """Parses the text between the tags.

    start: the tag and the space before it, which become text if this is no call. index: of the first call. limit: the
    most calls to make, None for any number.
    """

    def __init__(
        self, form: ToolFormat, tools: Sequence[Mapping[str, Any]], start: str, index: int, limit: int | None
    ) -> None:
        self._form = form
        self._tools = list(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._start = start
        self.next_index = index
        """The index of the next reader's first call."""
        self._index = index
        self._limit = limit
        self._payload = ""
        self._name: str | None = None  # set once a CallStart was passed on
        self._arguments = ""
        self._object = ObjectScanner()
        self._read = 0  # characters of the payload that the scanner has seen

    def feed(self, text: str) -> list[Delta]:
        self._payload += text
        deltas: list[Delta] = [] if self._name else self._begin()
        if self._name and not self._object.complete:
            end = self._object.scan(self._payload, self._read)
            piece, self._read = self._payload[self._read : end], end
            self._arguments += piece
            deltas += [CallArguments(self._index, piece)] if piece else []
        return deltas

    def ahead(self, text: str) -> int:
        """Returns how many characters of `text`, the next piece, belong to the arguments. A tag among them is part of a
        string."""
        if self._name is not None:
            return 0 if self._object.complete else copy.copy(self._object).scan(text, 0)
        payload = self._payload + text
        header = HEADERS[self._form.name].match(payload)
        end = len(payload) if header is None else ObjectScanner().scan(payload, header.end())
        return max(0, end - len(self._payload))

    def _begin(self) -> list[Delta]:
        header = HEADERS.get(self._form.name)
        match = header.match(self._payload) if header else None
        if match is None or match[1] not in self._names:
            return []
        self._name, self._read = match[1], match.end()
        self.next_index = self._index + 1
        return [CallStart(self._index, new_call_id(), self._name)]

    def finish(self, end: str, closed: bool) -> list[Delta]:
        """end: the closing tag. closed: whether the call is complete; False if the answer ended in its middle."""
        try:
            calls = self._calls() if closed else None
        except Exception:  # mlx-lm's parsers raise errors of any type
            calls = None
        if calls is None:
            text = self._start + self._payload + end
            return [CallBroken(self._index, text) if self._name else Text(text)]
        deltas: list[Delta] = []
        for index, (call_id, name, arguments) in enumerate(calls[: self._limit], self._index):
            if index > self._index or self._name is None:
                deltas += [CallStart(index, call_id, name), CallArguments(index, arguments)]
            deltas.append(CallEnd(index))
            self.next_index = index + 1
        return deltas

    def _calls(self) -> list[tuple[str, str, str]]:
        """Returns (id, name, arguments) of every call. Raises if one is malformed or calls no tool of the request."""
        parsed = self._form.parse(self._payload, self._tools)
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not calls:
            raise ValueError("no call")
        checked = [self._checked(call, sent=i == 0 and self._name is not None) for i, call in enumerate(calls)]
        if self._name is not None:
            sent = json.loads(self._arguments, parse_constant=refuse)
            if not self._object.complete or (checked[0][1], json.loads(checked[0][2])) != (self._name, sent):
                raise ValueError("the parser reads it differently")
        return checked

    def _checked(self, call: Any, sent: bool) -> tuple[str, str, str]:
        """sent: whether its arguments were passed on as written. Then a number too large for a float is valid."""
        name, arguments = call["name"], call.get("arguments", {})
        if isinstance(arguments, str):  # some models write the JSON object as a string
            arguments = json.loads(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError("not a call of one of the tools")
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=sent)
        text.encode()  # raises for half a surrogate pair
        given = call.get("id")
        return given if isinstance(given, str) and CALL_ID.match(given) else new_call_id(), name, text


class ObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._in_string = self._escaped = False

    def scan(self, text: str, start: int) -> int:
        """Returns the position after the object, or after the text if the object goes on."""
        for position in range(start, len(text)):
            char = text[position]
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return position + 1
        return len(text)


def call_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a complete call as an object, for APIs that do not write them as text."""
    arguments: dict[str, Any] = json.loads(text, parse_float=finite)
    return arguments


def finite(number: str) -> float:
    """Returns a finite number, because JSON has no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
