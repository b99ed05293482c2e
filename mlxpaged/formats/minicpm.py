"""OpenBMB's MiniCPM5: functions without a section around them; a value may be a CDATA section."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.markup import Markup

MARKUP = Markup(
    opening=(),
    call=("<function name=", ">"),
    key=("<param name=", ">"),
    value_end="</param>",
    end="</function>",
    closing=(),
    typed=lambda written: (written.strip("\"'"), None),
    cdata=True,
    write_name=lambda name: f'"{name}"',
    write_key=lambda key, kind: f'"{key}"',
)

MINICPM5 = Format(
    name="minicpm5",
    models="MiniCPM5",
    starts=MARKUP.starts,
    ends=(MARKUP.end,),
    read=MARKUP.read,
    written=MARKUP.written,
    in_template=(('<function name="', '<param name="'),),
)
