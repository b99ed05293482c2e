"""A section of invocations with quoted names (MiniMax M2), and the same with a prefix before each tag (M3)."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.markup import Markup

M2 = Markup(
    opening=("<minimax:tool_call>",),
    call=("<invoke name=", ">"),
    key=("<parameter name=", ">"),
    value_end="</parameter>",
    end="</invoke>",
    closing=("</minimax:tool_call>",),
    typed=lambda written: (written.strip("\"'"), None),
    write_name=lambda name: f'"{name}"',
    write_key=lambda key, kind: f'"{key}"',
)
MARK = "]<]minimax[>["
M3 = Markup(
    opening=(f"{MARK}<tool_call>",),
    call=(f"{MARK}<invoke name=", ">"),
    key=(f"{MARK}<", ">"),
    value_end=MARK + "</{key}>",
    end=f"{MARK}</invoke>",
    closing=(f"{MARK}</tool_call>",),
    write_name=lambda name: f'"{name}"',
)

MINIMAX_M2 = Format(
    name="minimax_m2",
    models="MiniMax M2",
    starts=M2.opening,
    ends=M2.closing,
    read=M2.read,
    written=M2.written,
    in_template=(M2.opening,),
)
MINIMAX_M3 = Format(
    name="minimax_m3",
    models="MiniMax M3",
    starts=M3.opening,
    ends=M3.closing,
    tokens=(MARK,),
    read=M3.read,
    written=M3.written,
    in_template=((MARK, "<invoke name="),),
)
