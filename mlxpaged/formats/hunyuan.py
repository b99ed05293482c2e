"""Tencent's Hunyuan: a section of calls, each a name and pairs of tags; older models write a list of JSON objects."""

from __future__ import annotations

from mlxpaged.formats.format import Format, first_of
from mlxpaged.formats.json_calls import json_calls
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.pieces import Piece
from mlxpaged.formats.schemas import Schema
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, END, SEPARATOR = "<tool_calls>", "</tool_calls>", "<tool_sep>"
MARKUP = Markup(
    opening=(),
    call=("<tool_call>", SEPARATOR),
    key=("<arg_key>", "</arg_key>"),
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
    closing=(END,),
)


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.literal(START)
    yield from source.space()
    return (yield from inside(source, tools))


def read_json(source: Source, tools: Tools) -> Reading[list[Call]]:
    return (yield from json_calls(source, tools, END))


inside = first_of(MARKUP.read, read_json)


def written(name: str, schema: Schema | None) -> tuple[Piece, ...]:
    first, *rest = MARKUP.written(name, schema)
    return f"\n<tool_call>{first}", *rest


HUNYUAN = Format(
    name="hunyuan",
    models="Hunyuan",
    starts=(START,),
    ends=(END,),
    tokens=("<tool_call>", "</tool_call>", SEPARATOR, *MARKUP.key, MARKUP.value, MARKUP.value_end),
    read=read,
    written=written,
    in_template=((START, SEPARATOR), (START, "</tool_calls>")),
)
