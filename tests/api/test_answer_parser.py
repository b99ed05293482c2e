"""Deltas do not depend on how the text is cut. Text that looks like a call and is none stays text."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mlxpaged.api.generation.answer_parser import AnswerParser
from mlxpaged.api.generation.deltas import CallArguments, CallEnd, CallStart, Delta, Text, Thinking, joined
from mlxpaged.api.generation.tool_calls import AROUND_ARGUMENTS
from mlxpaged.engine import Constraint, StructuredOutput
from mlxpaged.models import Tags, ToolFormat
from tests.support import since_mlx_lm_0_32

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"city": {}}}}}
    for name in ("weather", "get.time", "say")
]


def tags(tool_format: str = "json_tools", think: bool = True) -> Tags:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{tool_format}")
    form = ToolFormat(tool_format, module.tool_call_start, module.tool_call_end, module.parse_tool_call)
    return Tags("<think>" if think else "", "</think>" if think else "", form)


def parse(
    pieces: list[str],
    *,
    using: Tags,
    thinking: bool = False,
    one_call: bool = False,
    held: StructuredOutput | None = None,
    tools: Sequence[Any] = TOOLS,
) -> list[Delta]:
    parser = AnswerParser(using, thinking, tools, one_call, held)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def uncut(deltas: list[Delta]) -> list[Any]:
    """Without the ids, which are new each time, and without the cuts."""
    result: list[Any] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, (Text, Thinking)) and type(last) is type(delta):
            result[-1] = type(delta)(last.text + delta.text)
        elif isinstance(delta, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(delta.index, last.text + delta.text)
        else:
            result.append(CallStart(delta.index, "id", delta.name) if isinstance(delta, CallStart) else delta)
    return result


def calls_of(deltas: list[Delta]) -> list[tuple[str, Any]]:
    return [(part.kind.name, json.loads(part.text)) for part in joined(deltas) if isinstance(part.kind, CallStart)]


def said(deltas: list[Delta], kind: type[Text] | type[Thinking]) -> str:
    return "".join(part.text for part in joined(deltas) if part.kind is kind)


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "[TOOL_CALLS]"),
        *("weather[ARGS]", '{"city": "Zürich"}', '{"name": "weather", "arguments": {"city": "B\\"}{"}}', '"', "}", "{"),
        *('{"name": "say", "arguments": {', '{"name": "king", "arguments": {}}', "<function=weather>", "</function>"),
        *("<parameter=city>\nRome\n</parameter>", "[say(city='x', n=1)]", "<|tool_call_start|>", "<|tool_call_end|>"),
        *("<", "<th", "</", "tool_call>", " ", "\n\n", "Hello", "a < b", "NaN", "\\ud800", '{"name": "say"}', "null"),
    ]
)
FORMATS = ("json_tools", "mistral", "qwen3_coder", "pythonic", "function_gemma", "kimi_k2", "minimax_m2", "glm47")


LETTERS, ANY_JSON = Constraint("regex", ".*"), Constraint("json_schema", "{}")
HELD = [
    StructuredOutput(thinking, "", "", text)
    for thinking in ("never", "may", "open")
    for text in (None, "free", LETTERS, ANY_JSON)
]


@given(
    pieces=st.lists(PIECES, max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=60),
    form=st.sampled_from([*FORMATS, None]),
    thinking=st.booleans(),
    one_call=st.booleans(),
    held=st.sampled_from([None, None, *HELD]),
)
def test_the_deltas_do_not_depend_on_the_cuts(
    pieces: list[str], cuts: list[int], form: str | None, thinking: bool, one_call: bool, held: StructuredOutput | None
) -> None:
    assume(held is None or form in (*AROUND_ARGUMENTS, None))
    text, using, tools = "".join(pieces), tags(form or "json_tools"), TOOLS if form else []
    at = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    options: dict[str, Any] = {"using": using, "thinking": thinking, "one_call": one_call, "held": held, "tools": tools}
    whole = parse([text], **options)
    for cut in ([text[a:b] for a, b in itertools.pairwise(at)], list(text)):
        assert uncut(parse(cut, **options)) == uncut(whole)
    made = [delta.index for delta in whole if isinstance(delta, CallEnd)]
    assert made == [part.kind.index for part in joined(whole) if isinstance(part.kind, CallStart)]
    assert all(isinstance(arguments, dict) for _, arguments in calls_of(whole))
    assert len(made) <= 1 or not one_call


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json_tools", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
        ("json_tools", '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
        pytest.param(
            *("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]'),
            marks=since_mlx_lm_0_32,
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        ),
        ("pythonic", "<|tool_call_start|>[weather(city='Rome')]<|tool_call_end|>"),
        ("function_gemma", "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>"),
    ],
)
def test_a_call_is_read_in_the_models_own_format(form: str, text: str) -> None:
    assert calls_of(parse([text], using=tags(form))) == [("weather", {"city": "Rome"})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>gibberish</tool_call>",
        '<tool_call>{"name": "king", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}, "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        '<tool_call>{"name": "weather", "arguments": {}}',
        '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_text_as_the_model_wrote_it(text: str) -> None:
    deltas = parse([f"Look: {text} There."], using=tags())
    assert (said(deltas, Text), calls_of(deltas)) == (f"Look: {text} There.", [])


def test_arguments_go_out_as_they_come() -> None:
    parser = AnswerParser(tags(), False, TOOLS, False)
    assert parser.feed('<tool_call>{"name": "weather", "argu') == []
    start, *rest = parser.feed('ments": {"city"')
    assert (type(start), rest) == (CallStart, [CallArguments(0, '{"city"')])
    assert parser.feed(': "Ro') == [CallArguments(0, ': "Ro')]
    assert parser.feed('me"}}</tool_') == [CallArguments(0, 'me"}')]
    assert parser.feed("call>") == [CallEnd(0)]
    assert parser.calls_made == 1


def test_thinking_is_apart_and_white_space_around_it_dropped() -> None:
    for text, thinking in (("<think>\nHm, a < b.\n</think>\n\nYes. ", False), ("Hm, a < b.\n</think>\n\nYes. ", True)):
        deltas = parse(list(text), using=tags(), thinking=thinking)
        assert (said(deltas, Thinking), said(deltas, Text)) == ("Hm, a < b.", "Yes. ")


def test_calls_are_not_looked_for_in_thinking() -> None:
    deltas = parse(['<think><tool_call>{"name": "say"}</tool_call></think>ok'], using=tags())
    assert said(deltas, Thinking) == '<tool_call>{"name": "say"}</tool_call>'
    assert said(deltas, Text) == "ok"


def test_after_the_only_call_that_is_wanted_nothing_follows() -> None:
    text = 'I ask. <tool_call>{"name": "say"}</tool_call> <tool_call>{"name": "weather"}</tool_call> Done.'
    both = parse([text], using=tags())
    assert [name for name, _ in calls_of(both)] == ["say", "weather"]
    assert said(both, Text) == "I ask. Done."
    one = parse([text], using=tags(), one_call=True)
    assert (calls_of(one), said(one, Text)) == ([("say", {})], "I ask.")
