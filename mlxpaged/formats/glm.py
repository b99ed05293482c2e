"""Pairs of tags for keys and values (Z.ai's GLM-4.5 to 4.7; Poolside's Laguna; in a namespace, Meituan's LongCat). Some
of these models write Hermes' JSON between the tags."""

from __future__ import annotations

from mlxpaged.formats.format import Format, first_of
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.markup import Markup
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools


def pairs(name: str, models: str, space: str) -> Format:
    """space: the namespace of the tags."""
    markup = Markup(
        opening=(f"<{space}tool_call>",),
        call=("", ""),
        key=(f"<{space}arg_key>", f"</{space}arg_key>"),
        value=f"<{space}arg_value>",
        value_end=f"</{space}arg_value>",
        end="",
        closing=(f"</{space}tool_call>",),
        bare_name=True,
    )

    def read_json(source: Source, tools: Tools) -> Reading[list[Call]]:
        yield from source.literal(*markup.opening)
        return (yield from json_calls(source, tools, *markup.closing))

    return Format(
        name=name,
        models=models,
        starts=markup.starts,
        ends=markup.closing,
        tokens=(*markup.key, markup.value, markup.value_end),
        read=first_of(markup.read, read_json),
        written=markup.written,
        written_json=written_json("\n", f"\n{markup.closing[0]}"),
        in_template=((markup.opening[0], markup.key[0]), *((markup.opening,) if space else ())),
    )


GLM = pairs("glm47", "GLM-4.5, GLM-4.6, GLM-4.7, Laguna", "")
LONGCAT = pairs("longcat", "LongCat", "longcat_")
