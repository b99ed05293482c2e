"""Calls as JSON between <run> and </run>."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, END = "<run>", "</run>"


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(START)
    return (yield from json_calls(source, tools, END))


RUN_TAGS = Format(
    name="run_tags",
    models="no real ones",
    starts=(START,),
    ends=(END,),
    read=read,
    in_template=((START, END),),
    written=written_json("", END),
)
