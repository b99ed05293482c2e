"""DeepSeek's markup language: a tag says whether a value is a string (V3.2, V4)."""

from __future__ import annotations

import re

from mlxpaged.formats.format import Format
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall

MARK = "｜DSML｜"
KEY = re.compile(r'"([^"]*)"(?:\s+string="(true|false)")?\s*\Z')


def typed(written: str) -> tuple[str, bool | None]:
    found = KEY.match(written)
    if found is None:
        raise NotACall
    return found[1], None if found[2] is None else found[2] == "true"


SECTIONS = ("function_calls", "tool_calls")
DSML = Markup(
    opening=tuple(f"<{MARK}{section}>" for section in SECTIONS),
    call=(f"<{MARK}invoke name=", ">"),
    key=(f"<{MARK}parameter name=", ">"),
    value_end=f"</{MARK}parameter>",
    end=f"</{MARK}invoke>",
    closing=tuple(f"</{MARK}{section}>" for section in SECTIONS),
    typed=typed,
    is_told=True,
    write_name=lambda name: f'"{name}"',
    write_key=lambda key, kind: f'"{key}" string="{"true" if kind == "string" else "false"}"',
)

DEEPSEEK_V32 = Format(
    name="deepseek_v32",
    models="DeepSeek V3.2, V4",
    starts=DSML.opening,
    ends=DSML.closing,
    tokens=(MARK,),
    read=DSML.read,
    written=DSML.written,
    in_template=((MARK,),),
    in_vocabulary=(MARK,),
)
