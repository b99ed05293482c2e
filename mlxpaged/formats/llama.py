"""Meta's Llama 3.1 to 3.3: a JSON object with "parameters", as the whole answer or after a special token; Llama 3.2
also writes calls in Python."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.pythonic import python_calls
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

START = "<|python_tag|>"


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(START)
    yield from source.space()
    if (yield from source.ahead("{", '[{"', "[\n", "[ {")):
        return (yield from json_calls(source, tools))
    return (yield from python_calls(source, tools))


LLAMA_3 = Format(
    name="llama3",
    models="Llama 3.1, 3.2, 3.3",
    starts=(START,),
    first=("{", "["),
    read=read,
    in_template=((START,), ("<|start_header_id|>", '"parameters"')),
    in_vocabulary=("<|start_header_id|>", START),
    written=written_json("", "", "parameters"),
)
