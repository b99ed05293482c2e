"""Calls that are one JSON object, with the tool's name in it."""

from __future__ import annotations

import json
from collections.abc import Callable

from mlxpaged.formats.pieces import Piece, object_of
from mlxpaged.formats.schemas import Schema
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

NAME = ("name", "tool_name", "tool", "function_name")
ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_parameters")
OTHERS = ("id", "type", "tool_call_id")
KEYS = frozenset((*NAME, *ARGUMENTS, *OTHERS, "function"))
"""Keys that models write for the name and for the arguments. An object with other keys is no call: what they say would
be lost."""


def json_call(source: Source, tools: Tools) -> Reading[Call]:
    """Reads {"name": ..., "arguments": {...}}, or this in {"type": "function", "function": ...}."""
    members = yield from source.members(KEYS)
    found = dict(members)
    if len(found) < len(members):
        raise NotACall
    if found.keys() - OTHERS == {"function"} and found["function"].startswith("{"):
        inner = Source(text=found["function"])
        inner.ended = True
        return (yield from json_call(inner, tools))
    if found.get("type") == '"function"' and found.get("function", "")[:1] == '"':
        found["name"] = found.pop("function")
    names = [key for key in NAME if key in found]
    given = [key for key in ARGUMENTS if key in found]
    if len(names) != 1 or len(given) > 1 or found.keys() - {*names, *given, *OTHERS}:
        raise NotACall
    call_id = found.get("id", found.get("tool_call_id", "null"))
    return tools.call(
        text_of(found[names[0]]),
        found[given[0]] if given else "{}",
        text_of(call_id) if call_id.startswith('"') else None,
    )


def written_json(before: str, after: str, key: str = "arguments") -> Callable[[str, Schema | None], tuple[Piece, ...]]:
    """Returns how calls are written as {"name": ..., "arguments": ...} with these texts around them."""

    def written(name: str, schema: Schema | None) -> tuple[Piece, ...]:
        return f'{before}{{"name": {json.dumps(name)}, "{key}": ', object_of(schema), f"}}{after}"

    return written


def written_after(before: str, after: str) -> Callable[[str, Schema | None], tuple[Piece, ...]]:
    """The same for JSON after a text with the tool's name in it, as {name}."""

    def written(name: str, schema: Schema | None) -> tuple[Piece, ...]:
        return tuple(filter(None, (before.format(name=name), object_of(schema), after)))

    return written


def text_of(written: str) -> str:
    """Returns a JSON string's text."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, str):
        raise NotACall
    return value


def json_calls(source: Source, tools: Tools, *closings: str) -> Reading[list[Call]]:
    """Reads calls one after another, or a list of them, to a closing tag. If the tag is missing, they end where other
    text begins."""
    calls: list[Call] = []
    yield from source.space()
    if (yield from source.maybe("[")):
        while not (yield from closed_list(source)):
            calls.append((yield from json_call(source, tools)))
            source.keep(calls)
            yield from source.space()
            yield from source.maybe(",")
        if not calls:
            raise NotACall
    else:
        more = True
        while more:
            calls.append((yield from json_call(source, tools)))
            source.keep(calls)
            more = yield from next_object(source)
    yield from source.close(*closings)
    return calls


def closed_list(source: Source) -> Reading[bool]:
    yield from source.space()
    return bool((yield from source.maybe("]")))


def next_object(source: Source) -> Reading[bool]:
    """Whether another object follows. Reads a separator before it."""
    start = source.at
    yield from source.space()
    yield from source.maybe(",", ";")
    yield from source.space()
    if (yield from source.ahead("{")):
        return True
    source.at = start
    return False
