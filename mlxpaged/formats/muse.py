"""Muse Spark: invocations in a namespace."""

from __future__ import annotations

import re

from mlxpaged.formats.format import Format
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall

NAME = re.compile(r'[^>]*?\bname="([^"]*)"')


def named(written: str) -> tuple[str, None]:
    found = NAME.match(written)
    if found is None:
        raise NotACall
    return found[1], None


MARKUP = Markup(
    opening=("<atem:function_calls>",),
    call=("<atem:invoke name=", ">"),
    key=("<atem:parameter ", ">"),
    value_end="</atem:parameter>",
    end="</atem:invoke>",
    closing=("</atem:function_calls>",),
    typed=named,
    write_name=lambda name: f'"{name}"',
    write_key=lambda key, kind: f'name="{key}"',
)

MUSE_SPARK = Format(
    name="muse_spark",
    models="Muse Spark",
    starts=MARKUP.opening,
    ends=MARKUP.closing,
    read=MARKUP.read,
    written=MARKUP.written,
    in_template=(MARKUP.opening,),
)
