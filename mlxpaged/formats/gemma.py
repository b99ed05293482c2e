"""Google's Gemma 4 and FunctionGemma: a call with keys without quotes, and strings between tags."""

from __future__ import annotations

from mlxpaged.formats.format import Format
from mlxpaged.formats.literals import Notation
from mlxpaged.formats.pieces import Either, Listed, Piece, argument, object_of, properties, self_contained, without_null
from mlxpaged.formats.schemas import Schema
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.tools import Call, Tools

MAX_NAME = 256


def gemma(name: str, models: str, start: str, end: str, quote: str) -> Format:
    notation = Notation(quote, bare_keys=True)

    def read(source: Source, tools: Tools) -> Reading[list[Call]]:
        yield from source.maybe(start)
        yield from source.space()
        yield from source.literal("call:")
        called = (yield from source.before("{", end, most=MAX_NAME)).strip()
        schema = tools.schema(called)
        if not (yield from source.maybe("{")):
            raise NotACall
        arguments = yield from notation.object(source, schema=schema, root=schema)
        yield from source.close(end)
        if not source.thinking and (yield from source.has_more_ends(start, end)):
            raise NotACall
        return [tools.call(called, arguments)]

    def written(name: str, schema: Schema | None) -> tuple[Piece, ...]:
        """Strings in lists and objects are in JSON, which is read too."""
        if schema is None:
            return f"call:{name}", object_of(None), end
        items = []
        for key, (each, must) in properties(schema).items():
            text = without_null(each, schema)
            is_string, value = argument(each if text is None else text, schema, quote, is_told=True)
            if not is_string:
                value = (object_of(self_contained(each, schema)),)
            written: tuple[Piece, ...] = (f"{key}:{quote}" if is_string else f"{key}:", *value)
            items.append((must, written if text is None else (Either((written, (f"{key}:null",))),)))
        return f"call:{name}{{", Listed(tuple(items), ","), f"}}{end}"

    return Format(
        name,
        models,
        (start,),
        read,
        ends=(end,),
        tokens=(quote,),
        in_template=((start, end),),
        written=written,
    )


GEMMA_4 = gemma("gemma4", "Gemma 4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = gemma("function_gemma", "FunctionGemma", "<start_function_call>", "<end_function_call>", "<escape>")
