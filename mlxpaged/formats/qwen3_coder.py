"""A tag for the function and one for each parameter (Qwen's Qwen3-Coder). Some of these models write Hermes' JSON
between the tags."""

from __future__ import annotations

from mlxpaged.formats.format import Format, first_of
from mlxpaged.formats.hermes import HERMES
from mlxpaged.formats.markup import Markup

MARKUP = Markup(
    opening=("<tool_call>",),
    call=("<function=", ">"),
    key=("<parameter=", ">"),
    value_end="</parameter>",
    end="</function>",
    closing=("</tool_call>",),
    line_feeds=True,
)


QWEN3_CODER = Format(
    name="qwen3_coder",
    models="Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3, Step 3.5",
    starts=MARKUP.starts,
    ends=MARKUP.closing,
    read=first_of(MARKUP.read, HERMES.read),
    written=MARKUP.written,
    written_json=HERMES.written,
    in_template=(("<tool_call>\n<function=",), ("<tool_call>", "<function=", "<parameter=")),
)
