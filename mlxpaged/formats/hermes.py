"""One JSON object between two tags, as NousResearch's Hermes 2 Pro writes it. Many models saw it in training, so models
without a format of their own are asked to write it."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, END = "<tool_call>", "</tool_call>"


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    if not (yield from source.maybe(START)):
        calls = yield from json_calls(source, tools, END)
        if not all(map(tools.fit, calls)):
            raise NotACall
        return calls
    yield from source.space()
    fenced = yield from source.maybe("```json", "```")
    calls = yield from json_calls(source, tools, *((f"```{END}", f"```\n{END}", "```") if fenced else (END,)))
    if fenced:
        yield from source.close(END)
    return calls


HERMES = Format(
    name="json_tools",
    models="Qwen3, SmolLM3, Granite 4, Hermes 3, ERNIE 4.5",
    starts=(START,),
    first=('{"name"', '{ "name"', '{\n"name"'),
    ends=(END,),
    read=read,
    in_template=((START, "tool_call"),),
    written=written_json("\n", f"\n{END}"),
)
