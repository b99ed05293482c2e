"""A list of calls in Python (Liquid AI's LFM2)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from mlxpaged.formats.format import Format
from mlxpaged.formats.literals import PYTHON
from mlxpaged.formats.pieces import Json, Listed, Piece, Raw, object_of, properties, self_contained
from mlxpaged.formats.schemas import Schema, types_of
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

PLAIN = {"type", "description", "title", "default"}
"""Words of a schema that leave a truth value free."""

MAX_NAME = 256


def python_calls(source: Source, tools: Tools) -> Reading[list[Call]]:
    """Reads [name(key=value, ...), ...]."""
    yield from source.space()
    listed = yield from source.maybe("[")
    calls = [(yield from python_call(source, tools))]
    while True:
        source.keep(calls)
        yield from source.space()
        if listed and (yield from source.maybe("]")):
            return calls
        start = source.at
        separator = yield from source.maybe(",") if listed else source.maybe(";")
        yield from source.space()
        if listed and separator and (yield from source.maybe("]")):
            return calls
        if not separator:
            if listed:
                raise NotACall
            source.at = start
            return calls
        calls.append((yield from python_call(source, tools)))


def python_call(source: Source, tools: Tools) -> Reading[Call]:
    yield from source.space()
    name, _ = yield from source.until("(", most=MAX_NAME)
    name = name.strip()
    tools.schema(name)
    arguments: dict[str, str] = {}
    while True:
        yield from source.space()
        if (yield from source.maybe(")")):
            return tools.call_of(name, arguments)
        if arguments:
            yield from source.literal(",")
            yield from source.space()
            if (yield from source.maybe(")")):
                return tools.call_of(name, arguments)
        key = (yield from source.before("=", ",", ")", "(", "\n", most=MAX_NAME)).strip()
        yield from source.literal("=")
        if key in arguments or not key or key.startswith(("'", '"')):
            raise NotACall
        arguments[key] = yield from PYTHON.value(source)


def tagged(starts: tuple[str, ...], ends: tuple[str, ...], source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(*starts)
    calls = yield from python_calls(source, tools)
    yield from source.close(*ends)
    return calls


def show_python(name: str, arguments: str) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in json.loads(arguments).items())
    return f"<|tool_call_start|>[{name}({values})]<|tool_call_end|>"


def value_of(schema: Any, root: Schema) -> Piece:
    """A value in JSON. Truth values may be Python's, which models write."""
    if not isinstance(schema, Mapping):  # true, which all values fit, or false
        return Json("true" if schema else "false")
    if types_of(schema, root) == {"boolean"} and schema.keys() <= PLAIN:
        return Raw("", ("True", "False", "true", "false"))
    return object_of(self_contained(schema, root))


def written(end: str) -> Callable[[str, Schema | None], tuple[Piece, ...]]:
    """Returns how a list with one call is written, to the tag `end`. Values are in JSON, which is read too."""

    def in_python(name: str, schema: Schema | None) -> tuple[Piece, ...]:
        if schema is None:
            return f"[{name}(", Raw(f")]{end}")
        given = properties(schema).items()
        items = [(must, (f"{key}=", value_of(each, schema))) for key, (each, must) in given]
        return f"[{name}(", Listed(tuple(items), ", "), f")]{end}"

    return in_python


LFM2_TAGS = ("<|tool_call_start|>",), ("<|tool_call_end|>",)
LFM2 = Format(
    name="pythonic",
    models="LFM2, LFM2.5",
    starts=LFM2_TAGS[0],
    ends=LFM2_TAGS[1],
    read=functools.partial(tagged, *LFM2_TAGS),
    in_template=(("<|tool_list_start|>",), ("<|tool_call_start|>",)),
    in_vocabulary=("<|tool_call_start|>", "<|tool_call_end|>"),
    shown=show_python,
    written=written(*LFM2_TAGS[1]),
)
