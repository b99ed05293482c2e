"""Meituan's LongCat: JSON between its own tags, or pairs of tags for keys and values."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

MARKUP = Markup(
    opening=("<longcat_tool_call>",),
    call=("", ""),
    key=("<longcat_arg_key>", "</longcat_arg_key>"),
    value="<longcat_arg_value>",
    value_end="</longcat_arg_value>",
    end="",
    closing=("</longcat_tool_call>",),
    bare_name=True,
    gap="",
)


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    start = source.at
    try:
        return (yield from MARKUP.read(source, tools))
    except NotACall:
        source.at = start
    yield from source.literal(*MARKUP.opening)
    return (yield from json_calls(source, tools, *MARKUP.closing))


LONGCAT = Format(
    name="longcat",
    models="LongCat",
    starts=MARKUP.opening,
    ends=MARKUP.closing,
    tokens=(*MARKUP.key, MARKUP.value, MARKUP.value_end),
    read=read,
    written=MARKUP.written,
    in_template=(MARKUP.opening,),
)
