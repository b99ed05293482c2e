"""Tencent's Hunyuan: a section of calls, each a name and pairs of tags; older models write a list of JSON objects. The
tags of Hy3 have a suffix."""

from __future__ import annotations

from mlxpaged.formats.format import Format, first_of
from mlxpaged.formats.json_calls import json_calls
from mlxpaged.formats.markup import Markup, separated
from mlxpaged.formats.pieces import Piece
from mlxpaged.formats.schemas import Schema
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

SUFFIX = ":opensource"


def hunyuan(
    name: str, models: str, suffix: str, in_template: tuple[tuple[str, ...], ...], in_vocabulary: tuple[str, ...] = ()
) -> Format:
    """suffix: of each tag's name."""
    start, end = f"<tool_calls{suffix}>", f"</tool_calls{suffix}>"
    markup = Markup(
        opening=(),
        call=(f"<tool_call{suffix}>", f"<tool_sep{suffix}>"),
        key=(f"<arg_key{suffix}>", f"</arg_key{suffix}>"),
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
        closing=(end,),
    )

    def read_json(source: Source, tools: Tools) -> Reading[list[Call]]:
        return (yield from json_calls(source, tools, end))

    inside = first_of(markup.read, read_json)

    def read(source: Source, tools: Tools) -> Reading[list[Call]]:
        yield from source.literal(start)
        yield from source.space()
        return (yield from inside(source, tools))

    def written(name: str, schema: Schema | None) -> tuple[Piece, ...]:
        first, *rest = markup.written(name, schema)
        return *separated(f"{markup.call[0]}{first}"), *rest

    return Format(
        name=name,
        models=models,
        starts=(start,),
        ends=(end,),
        tokens=(*markup.call, markup.end, *markup.key, markup.value, markup.value_end),
        read=read,
        written=written,
        in_template=in_template,
        in_vocabulary=in_vocabulary,
    )


HUNYUAN_3 = hunyuan(
    *("hunyuan3", "Hunyuan Hy3", SUFFIX),
    in_template=(("<tool_calls{}>", SUFFIX), (f"<tool_calls{SUFFIX}>",)),
    in_vocabulary=(f"<tool_calls{SUFFIX}>", f"<tool_sep{SUFFIX}>"),
)
HUNYUAN = hunyuan(
    *("hunyuan", "Hunyuan, Apriel", ""),
    in_template=(("<tool_calls>", "<tool_sep>"), ("<tool_calls>", "</tool_calls>")),
)
