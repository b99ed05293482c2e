"""Moonshot AI's Kimi K2: an id that names the tool, and its arguments in JSON, between special tokens; and Kimi K3,
whose tags are all made of three tokens."""

from __future__ import annotations

import re

from mlxpaged.formats.format import Format, first_of
from mlxpaged.formats.json_calls import written_after
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

SECTIONS = ("tool_calls_section", "tool_call_section")  # they write both
STARTS = tuple(f"<|{section}_begin|>" for section in SECTIONS)
ENDS = tuple(f"<|{section}_end|>" for section in SECTIONS)
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
NAMED = re.compile(r"\s*((?:functions\.)?(.+?)(?::\d+)?)\s*\Z")
MAX_NAME = 256


def k2_id(given: str, name: str, number: int) -> str:
    """Returns the id that the model itself would write. It calls a tool by its id, and copies those that it sees."""
    return f"functions.{name}:{number}" if name else given


def read_k2(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(*STARTS)
    calls: list[Call] = []
    while True:
        yield from source.space()
        if calls and not (yield from source.ahead(CALL)):
            yield from source.close(*ENDS)
            return calls
        calls.append((yield from k2_call(source, tools)))
        source.keep(calls)


def k2_call(source: Source, tools: Tools) -> Reading[Call]:
    yield from source.literal(CALL)
    written, _ = yield from source.until(ARGUMENTS, most=MAX_NAME)
    found = NAMED.match(written)
    if found is None:
        raise NotACall
    name = found[1] if found[1] in tools.names else found[2]
    tools.schema(name)
    yield from source.space()
    arguments = "{}" if (yield from source.ahead(CALL_END)) else (yield from source.json())
    call = tools.call(name, arguments, found[1] if found[1] != found[2] else None)
    yield from source.close(CALL_END)
    return call


KIMI_K2 = Format(
    name="kimi_k2",
    models="Kimi K2",
    starts=(*STARTS, CALL),
    ends=(*ENDS, CALL_END),
    tokens=(ARGUMENTS,),
    read=read_k2,
    in_template=((STARTS[0],), (CALL,)),
    fit_id=k2_id,
    written=written_after(f"{CALL}functions.{{name}}:0{ARGUMENTS}", f"{CALL_END}{ENDS[0]}"),
)

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def attributes(written: str) -> dict[str, str]:
    """Raises NotACall if there is anything else: it would be lost."""
    found = ATTRIBUTE.findall(written)
    if ATTRIBUTE.sub("", written).strip():
        raise NotACall
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


def argument(written: str) -> tuple[str, bool | None]:
    tag = attributes(written)
    return tag.get("key", ""), tag.get("type", "string") == "string"


K3 = Markup(
    opening=(f"{OPEN}tools{SEPARATOR}",),
    call=(f"{OPEN}call", SEPARATOR),
    key=(f"{OPEN}argument", SEPARATOR),
    value_end=f"{CLOSE}argument{SEPARATOR}",
    end=f"{CLOSE}call{SEPARATOR}",
    closing=(f"{CLOSE}tools{SEPARATOR}",),
    named=lambda written: attributes(written).get("tool", ""),
    typed=argument,
    is_told=True,
    write_name=lambda name: f' tool="{name}" index="1"',
    write_key=lambda key, kind: f' key="{key}" type="{kind}"',
)


def read_k3_json(source: Source, tools: Tools) -> Reading[list[Call]]:
    """Reads calls whose arguments are in one JSON object."""
    yield from source.literal(*K3.opening)
    calls: list[Call] = []
    while True:
        yield from source.space()
        if calls and not (yield from source.ahead(K3.call[0])):
            yield from source.close(*K3.closing)
            return calls
        yield from source.literal(K3.call[0])
        tag, _ = yield from source.until(SEPARATOR, most=MAX_NAME)
        yield from source.space()
        yield from source.literal(f"{OPEN}json")
        yield from source.until(SEPARATOR, most=MAX_NAME)
        calls.append(tools.call(K3.named(tag), (yield from source.json())))
        yield from source.close(f"{CLOSE}json{SEPARATOR}")
        yield from source.close(K3.end)
        source.keep(calls)


KIMI_K3 = Format(
    name="kimi_k3",
    models="Kimi K3",
    starts=K3.opening,
    ends=K3.closing,
    tokens=(OPEN, CLOSE, SEPARATOR),
    dropped=(f"{OPEN}response{SEPARATOR}", f"{CLOSE}response{SEPARATOR}", f"{CLOSE}message{SEPARATOR}"),
    read=first_of(K3.read, read_k3_json),
    written=K3.written,
    in_vocabulary=(OPEN, CLOSE, SEPARATOR, "<|end_of_msg|>"),
)
