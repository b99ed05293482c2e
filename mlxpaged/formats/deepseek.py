"""DeepSeek V3, R1 and V3.1: a name and its arguments in JSON, between special tokens. V3.1 writes no type and no code
block. V3.2 and later are in dsml.py."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import written_after
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MAX_NAME = 256


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    yield from source.maybe(START)
    calls: list[Call] = []
    while True:
        yield from source.space()
        if calls and not (yield from source.ahead(CALL)):
            yield from source.close(END)
            return calls
        calls.append((yield from one(source, tools)))
        source.keep(calls)


def one(source: Source, tools: Tools) -> Reading[Call]:
    yield from source.literal(CALL)
    name, _ = yield from source.until(SEPARATOR, most=MAX_NAME)
    if name.strip() == "function" and "function" not in tools.names:
        name = (yield from source.before("\n", "{", "`", most=MAX_NAME)).strip()
    tools.schema(name.strip())
    yield from source.space()
    fenced = yield from source.maybe("```json", "```")
    call = tools.call(name.strip(), (yield from source.json()))
    if fenced:
        yield from source.space()
        yield from source.literal("```")
    yield from source.close(CALL_END)
    return call


def show(name: str, arguments: str) -> str:
    return f"{START}{CALL}{name}{SEPARATOR}{arguments}{CALL_END}{END}"


DEEPSEEK_V3 = Format(
    name="deepseek_v3",
    models="DeepSeek V3, R1, V3.1",
    starts=(START, CALL),
    ends=(END, CALL_END),
    tokens=(SEPARATOR,),
    read=read,
    in_template=((START,), (CALL,)),
    shown=show,
    written=written_after(f"{CALL}{{name}}{SEPARATOR}", f"{CALL_END}{END}"),
)
