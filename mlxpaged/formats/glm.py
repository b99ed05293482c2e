"""Pairs of tags for keys and values (Z.ai's GLM-4.5 to 4.7; Poolside's Laguna)."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.hermes import HERMES
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

MARKUP = Markup(
    opening=("<tool_call>",),
    call=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value="<arg_value>",
    value_end="</arg_value>",
    end="",
    closing=("</tool_call>",),
    bare_name=True,
    gap="",
)


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    start = source.at
    try:
        return (yield from MARKUP.read(source, tools))
    except NotACall:
        source.at = start
    return (yield from HERMES.read(source, tools))


GLM = Format(
    name="glm47",
    models="GLM-4.5, GLM-4.6, GLM-4.7, Laguna",
    starts=MARKUP.starts,
    ends=MARKUP.closing,
    tokens=(*MARKUP.key, MARKUP.value, MARKUP.value_end),
    read=read,
    written=MARKUP.written,
    in_template=(("<arg_key>", "<tool_call>"),),
)
