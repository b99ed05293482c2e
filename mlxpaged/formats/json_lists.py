"""Lists of JSON objects between two tags: the same in several families, with tags of their own."""

from __future__ import annotations

from dataclasses import replace

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_after, written_json
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools


def between(name: str, models: str, start: str, end: str, marker: str = "") -> Format:
    """marker: what these models also write before a list that is the whole answer."""

    def read(source: Source, tools: Tools) -> Reading[list[Call]]:
        if not (yield from source.maybe(*filter(None, (start, marker)))):
            raise NotACall
        return (yield from json_calls(source, tools, *filter(None, (end,))))

    return Format(
        name,
        models,
        (start,),
        read,
        ends=(end,) if end else (),
        first=(f"{marker}[",) if marker else (),
        in_template=((start, *filter(None, (end,))), *(((f"{marker}[",),) if marker else ())),
        written=written_json("[", f"]{end}"),
    )


PHI_4_MINI = between("phi4_mini", "Phi-4-mini", "<|tool_call|>", "<|/tool_call|>", marker="functools")
GRANITE_3 = between("granite3", "Granite 3", "<|tool_call|>", "")
NEMOTRON_NANO = between("nemotron_nano", "Nemotron Nano v2", "<TOOLCALL>", "</TOOLCALL>")

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"


def read_actions(source: Source, tools: Tools) -> Reading[list[Call]]:
    """The ids are numbers, which begin again in some answers. So they are not used."""
    yield from source.literal(ACTION)
    calls = yield from json_calls(source, tools, ACTION_END)
    return [replace(call, id=None) for call in calls]


COMMAND_R = Format(
    name="command_r",
    models="Command R7B, Command A",
    starts=(ACTION,),
    ends=(ACTION_END,),
    dropped=("<|START_RESPONSE|>",),
    read=read_actions,
    in_template=((ACTION, ACTION_END),),
    written=written_after('[\n    {{"tool_call_id": "0", "tool_name": "{name}", "parameters": ', f"}}\n]{ACTION_END}"),
)


def read_apertus(source: Source, tools: Tools) -> Reading[list[Call]]:
    """Reads a list of objects that have the tool's name as their only key."""
    yield from source.literal("<|tools_prefix|>")
    yield from source.space()
    yield from source.literal("[")
    calls: list[Call] = []
    while True:
        yield from source.space()
        if (yield from source.maybe("]")):
            break
        members = yield from source.members()
        if len(members) != 1:
            raise NotACall
        calls.append(tools.call(*members[0]))
        source.keep(calls)
        yield from source.space()
        yield from source.maybe(",")
    yield from source.close("<|tools_suffix|>")
    if not calls:
        raise NotACall
    return calls


APERTUS = Format(
    name="apertus",
    models="Apertus",
    starts=("<|tools_prefix|>",),
    ends=("<|tools_suffix|>",),
    read=read_apertus,
    in_template=(("<|tools_prefix|>",),),
    written=written_after('[{{"{name}": ', "}]<|tools_suffix|>"),
)
