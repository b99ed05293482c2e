"""Meta's Llama 3 and 4: a JSON object with "parameters", or a list of calls in Python, as the whole answer or after a
special token. Each of them is read in every model's answers; what the chat template asks for is enforced."""

from __future__ import annotations

import functools
from dataclasses import replace

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.pythonic import python_calls, written
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools


def read(starts: tuple[str, ...], ends: tuple[str, ...], source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(*starts)
    yield from source.space()
    if (yield from source.ahead("{", '[{"', "[\n", "[ {")):
        return (yield from json_calls(source, tools, *ends))
    calls = yield from python_calls(source, tools)
    yield from source.close(*ends)
    return calls


TAG = "<|python_tag|>"
LLAMA_3 = Format(
    name="llama3",
    models="Llama 3.1, 3.2, 3.3",
    starts=(TAG,),
    first=("{", "["),
    read=functools.partial(read, (TAG,), ()),
    in_template=((TAG,), ("<|start_header_id|>", '"parameters"')),
    in_vocabulary=("<|start_header_id|>", TAG),
    written=written_json("", "", "parameters"),
)

START, END = "<|python_start|>", "<|python_end|>"
LLAMA_4 = Format(
    name="llama4",
    models="Llama 4",
    starts=(START,),
    first=("{", "["),
    ends=(END,),
    read=functools.partial(read, (START,), (END,)),
    in_template=((START,), ("<|header_start|>", "python")),
    written=written(END),
)
LLAMA_4_JSON = replace(
    LLAMA_4,
    name="llama4_json",
    models="Llama 4, asked for JSON",
    in_template=(("<|header_start|>", '"parameters"'),),
    written=written_json("", END, "parameters"),
)
