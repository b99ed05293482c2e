"""ByteDance's Seed-OSS: tags like Qwen3-Coder's in a namespace."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.markup import Markup

MARKUP = Markup(
    opening=("<seed:tool_call>",),
    call=("<function=", ">"),
    key=("<parameter=", ">"),
    value_end="</parameter>",
    end="</function>",
    closing=("</seed:tool_call>",),
)

SEED_OSS = Format(
    name="seed_oss",
    models="Seed-OSS",
    starts=MARKUP.opening,
    ends=MARKUP.closing,
    read=MARKUP.read,
    written=MARKUP.written,
    in_template=(MARKUP.opening,),
)
