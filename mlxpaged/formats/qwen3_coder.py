"""A tag for the function and one for each parameter (Qwen's Qwen3-Coder)."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.hermes import HERMES
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

MARKUP = Markup(
    opening=("<tool_call>",),
    call=("<function=", ">"),
    key=("<parameter=", ">"),
    value_end="</parameter>",
    end="</function>",
    closing=("</tool_call>",),
    line_feeds=True,
)


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    """Some of these models write Hermes' JSON between the tags."""
    start = source.at
    try:
        return (yield from MARKUP.read(source, tools))
    except NotACall:
        source.at = start
    return (yield from HERMES.read(source, tools))


QWEN3_CODER = Format(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3, Step 3.5",
    starts=MARKUP.starts,
    ends=MARKUP.closing,
    read=read,
    written=MARKUP.written,
    in_template=(("<tool_call>\n<function=",), ("<tool_call>", "<function=", "<parameter=")),
)
