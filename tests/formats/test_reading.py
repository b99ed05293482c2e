"""What an answer says does not depend on how its text is cut. A call has what the model wrote, or all of it is text."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxpaged.api.generation.deltas import Delta, Text, Thinking, ToolCall, joined
from mlxpaged.core.engine.constraint import Constraint, StructuredOutput
from mlxpaged.core.text.answer_parser import AnswerParser, HarmonyParser, TagParser
from mlxpaged.formats import FORMATS, HARMONY
from mlxpaged.models.text.tokenizer import Tags
from tests.formats.written import GEMMA_QUOTE, WRITTEN, as_json, kimi_k2, named, qwen3_coder

THOUGHTS = {"mistral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>thought", "<channel|>")}


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING = {"type": "string"}
WRITE = tool("write_file", "path", "content", path=STRING, content=STRING)
WEATHER = tool("weather", city=STRING)
MIXED = tool(
    "mixed",
    text=STRING,
    number={"type": "number"},
    count={"type": "integer"},
    flag={"type": "boolean"},
    items={"type": "array", "items": STRING},
    options={"type": "object"},
)
TOOLS = [WEATHER, tool("say"), WRITE, MIXED, tool("mcp__fs__read-file", path=STRING), tool("get.time", zone=STRING)]


def new_parser(
    form: str,
    tools: Sequence[Any] = TOOLS,
    *,
    thinking: bool = False,
    one_call: bool = False,
    held: StructuredOutput | None = None,
    think: bool = True,
) -> AnswerParser:
    if FORMATS[form] is HARMONY:
        return HarmonyParser(tools, one_call)
    start, end = THOUGHTS.get(form, ("<think>", "</think>")) if think else ("", "")
    return TagParser(Tags(start, end, FORMATS[form], form in THOUGHTS), thinking, tools, one_call, held)


def parse(
    pieces: Sequence[str],
    form: str = "json_tools",
    tools: Sequence[Any] = TOOLS,
    is_cut: bool = False,
    **options: Any,
) -> list[Delta]:
    parser = new_parser(form, tools, **options)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(is_cut)


def uncut(deltas: list[Delta]) -> list[Any]:
    """Without the ids, which are new each time, and without the cuts."""
    result: list[Any] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, (Text, Thinking)) and type(last) is type(delta):
            result[-1] = type(delta)(last.text + delta.text)
        else:
            result.append(dataclasses.replace(delta, call_id="id") if isinstance(delta, ToolCall) else delta)
    return result


def calls_of(deltas: list[Delta]) -> list[tuple[str, Any]]:
    return [(part.kind.name, json.loads(part.text)) for part in joined(deltas) if isinstance(part.kind, ToolCall)]


def said(deltas: list[Delta], kind: type[Text] | type[Thinking] = Text) -> str:
    return "".join(part.text for part in joined(deltas) if part.kind is kind)


def squeezed(text: str, form: str = "json_tools") -> str:
    """Without white space and tags."""
    for tag in sorted((*FORMATS[form].tags, *THOUGHTS.get(form, ("<think>", "</think>"))), key=len, reverse=True):
        text = text.replace(tag, "")
    return re.sub(r"\s+", "", text)


# -- whole calls -------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "text": 'a < b "q" \\ é\n<b>x</b> {y}\n',
    "number": -2.5e-3,
    "count": 12345678901234567890,
    "flag": True,
    "items": ["a", "  b'c\n"],
    "options": {"deep": {"list": [1, None, "x"]}},
}


def test_every_format_is_tried() -> None:
    assert WRITTEN.keys() == FORMATS.keys()


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_has_the_values_that_the_model_wrote(form: str) -> None:
    text = WRITTEN[form]("mixed", VALUES)
    deltas = parse([text], form)
    assert (calls_of(deltas), said(deltas)) == ([("mixed", VALUES)], "")
    for cut in range(1, len(text)):
        assert uncut(parse([text[:cut], text[cut:]], form)) == uncut(deltas), text[:cut]


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(
    "text", ["", " ", "\n", "  two\n\n  lines\n", "null", "02134", "1e5", "true", "[1]", "{}", '"q"']
)
def test_a_string_stays_as_it_is(form: str, text: str) -> None:
    arguments = {"path": "a", "content": text}
    assert calls_of(parse([WRITTEN[form]("write_file", arguments)], form)) == [("write_file", arguments)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("gemma4", "<|tool_call>call:mixed{items:[STRING]}<tool_call|>"),
        ("function_gemma", "<start_function_call>call:mixed{items:[STRING]}<end_function_call>"),
        ("pythonic", "<|tool_call_start|>[mixed(items=[STRING])]<|tool_call_end|>"),
        ("json_tools", '<tool_call>\n{"name": "mixed", "arguments": {"items": [STRING]}}\n</tool_call>'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=mixed>\n<parameter=items>\n[STRING]\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_a_string_in_a_list_may_have_every_escape_of_json(form: str, text: str) -> None:
    written, meant = r'"\ud83d\ude42 \uD834\uDD1E \u00e9 it\u2019s a\/b \"\\ \u0009"', '🙂 𝄞 é it\u2019s a/b "\\ \t'
    assert calls_of(parse([text.replace("STRING", written)], form)) == [("mixed", {"items": [meant]})]
    assert calls_of(parse([text.replace("STRING", r'"\ud83d"')], form)) == []


NULLABLE = tool(
    "note",
    plain=STRING,
    union={"anyOf": [STRING, {"type": "null"}], "default": None},
    listed={"type": ["string", "null"], "maxLength": 9},
    other={"oneOf": [{"type": "null"}, STRING]},
    named={"enum": ["null", "x", None]},
    several={"type": ["string", "integer", "null"]},
)


@pytest.mark.parametrize("form", WRITTEN)
def test_null_is_no_text_where_the_schema_has_null(form: str) -> None:
    arguments = {"plain": "null", "union": None, "listed": None, "other": None, "named": "null", "several": None}
    assert calls_of(parse([WRITTEN[form]("note", arguments)], form, [NULLABLE])) == [("note", arguments)]
    texts = dict.fromkeys(("union", "listed", "other", "several"), "nullable")
    assert calls_of(parse([WRITTEN[form]("note", texts)], form, [NULLABLE])) == [("note", texts)]


@pytest.mark.parametrize("form", WRITTEN)
def test_what_a_cut_answer_begins_after_a_call_is_no_text(form: str) -> None:
    one = WRITTEN[form]("weather", {"city": "Rome"})
    for between in ("", "\n"):
        text = f"{one}{between}{one}"
        for cut in range(len(one), len(text)):
            deltas = parse([text[:cut]], form, is_cut=True)
            assert (said(deltas), calls_of(deltas)[0]) == ("", ("weather", {"city": "Rome"})), text[len(one) : cut]


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_without_arguments_and_with_odd_names(form: str) -> None:
    write = WRITTEN[form]
    assert calls_of(parse([write("say", {})], form)) == [("say", {})]
    for name in ("mcp__fs__read-file", "get.time"):
        arguments = {"path" if "read" in name else "zone": "x"}
        assert calls_of(parse([write(name, arguments)], form)) == [(name, arguments)]


@pytest.mark.parametrize("form", WRITTEN)
def test_an_unknown_tool_and_a_cut_call_are_text(form: str) -> None:
    write = WRITTEN[form]
    whole = write("weather", {"city": "Rome"})
    for text in (write("king", {"city": "Rome"}), whole[: whole.index("Rome") + 3]):
        deltas = parse([f"Look.\n{text}" if form != "llama3" else text], form)
        assert calls_of(deltas) == []
        assert squeezed(text, form) in squeezed(said(deltas), form)


@pytest.mark.parametrize("form", sorted(WRITTEN.keys() - {"llama3"}))  # there, a call is the whole answer
def test_several_calls_after_a_thought_and_a_text(form: str) -> None:
    start, end = THOUGHTS.get(form, ("<think>", "</think>"))
    one, other = WRITTEN[form]("weather", {"city": "Rome"}), WRITTEN[form]("write_file", {"path": "a", "content": "b"})
    if FORMATS[form] is HARMONY:
        begin = "<|start|>assistant"
        thought = "<|channel|>analysis<|message|>I think.<|end|>"
        text = f"{thought}{begin}<|channel|>commentary<|message|>I look.<|end|>{begin}{one}{begin}{other}"
    else:
        text = f"{start}\nI think.\n{end}\n\nI look.\n\n{one}\n{other}"
    deltas = parse(list(text), form)
    assert calls_of(deltas) == [("weather", {"city": "Rome"}), ("write_file", {"path": "a", "content": "b"})]
    assert (said(deltas, Thinking), said(deltas).strip()) == ("I think.", "I look.")
    assert [delta.index for delta in deltas if isinstance(delta, ToolCall)] == [0, 1]
    assert len({delta.call_id for delta in deltas if isinstance(delta, ToolCall)}) == 2
    assert [name for name, _ in calls_of(parse(list(text), form, one_call=True))] == ["weather"]


@pytest.mark.parametrize("form", sorted(WRITTEN.keys() - {"llama3", "harmony"}))
def test_a_call_in_a_thought_counts_if_nothing_comes_after_it(form: str) -> None:
    start, end = THOUGHTS.get(form, ("<think>", "</think>"))
    call = WRITTEN[form]("weather", {"city": "Rome"})
    deltas = parse(list(f"{start}I need it. {call}"), form)
    assert (said(deltas, Thinking), calls_of(deltas)) == ("I need it.", [("weather", {"city": "Rome"})])
    for text in (f"{start}I could {call} but no.{end}\n\nSo.", f"{start}I could\n{call}\n{end}\n\nSo."):
        deltas = parse(list(text), form)
        assert (calls_of(deltas), said(deltas)) == ([], "So.")
        assert call in said(deltas, Thinking)


@pytest.mark.parametrize("form", sorted(WRITTEN.keys() - {"llama3"}))
def test_a_complete_call_before_a_cut_one_is_not_lost(form: str) -> None:
    one, other = WRITTEN[form]("weather", {"city": "Rome"}), WRITTEN[form]("weather", {"city": "Paris"})
    text = f"{one}\n{other[: other.index('Paris') + 3]}"
    deltas = parse(list(text), form)
    assert calls_of(deltas) == [("weather", {"city": "Rome"})]
    assert "Par" in said(deltas)


CITY = {"type": "object", "properties": {"name": STRING, "zip": STRING, "size": {"type": "integer"}}}
TRIP = tool(
    "trip",
    city=STRING,
    unit={"enum": ["celsius", "kelvin"]},
    days={"type": "integer"},
    stops={"type": "array", "items": STRING},
    home={"$ref": "#/$defs/city"},
    cities={"type": "array", "items": CITY},
    note={"anyOf": [STRING, {"type": "null"}]},
    any={},
)
TRIP["function"]["parameters"]["$defs"] = {"city": CITY}


@pytest.mark.parametrize("form", ["gemma4", "function_gemma"])
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("city:Rome", {"city": "Rome"}),
        ("city: New York ,days:3", {"city": "New York", "days": 3}),
        ("city:12:30,unit:kelvin", {"city": "12:30", "unit": "kelvin"}),
        ("stops:[Rome, New York,Q7Q]", {"stops": ["Rome", "New York", "7"]}),
        ("home:{name:Rome,zip:00184,size:3}", {"home": {"name": "Rome", "zip": "00184", "size": 3}}),
        ("cities:[{name:Rome},{zip:7}]", {"cities": [{"name": "Rome"}, {"zip": "7"}]}),
        ("note:null,city:true", {"note": None, "city": "true"}),
        ("note:none of it", {"note": "none of it"}),
        ("any:3,days:4", {"any": 3, "days": 4}),
        ("days:three", None),
        ("any:Rome", None),
        ("city:", None),
        ("city:Rome, Italy", None),
        ("city:f{x", None),
        ("city:<b>", None),
    ],
)
def test_a_word_without_quotes_is_a_string_where_the_schema_says_so(
    form: str, written: str, arguments: dict[str, Any] | None
) -> None:
    """Else the call is text."""
    start, end = FORMATS[form].starts[0], FORMATS[form].ends[0]
    text = f"{start}call:trip{{{written.replace('Q', GEMMA_QUOTE if form == 'gemma4' else '<escape>')}}}{end}"
    for pieces in ([text], list(text)):
        deltas = parse(pieces, form, [TRIP])
        assert calls_of(deltas) == ([] if arguments is None else [("trip", arguments)])
        assert said(deltas) == (text if arguments is None else "")


SEVERAL = {
    "json_tools": "<tool_call>\n{}\n{}\n</tool_call>",
    "phi4_mini": "<|tool_call|>[{}, {}]<|/tool_call|>",
    "mistral": "[TOOL_CALLS][{}, {}]",
    "hunyuan": "<tool_calls>[{}, {}]</tool_calls>",
    "llama3": "{}; {}",
}


@pytest.mark.parametrize("form", SEVERAL)
def test_several_json_objects_in_one_section(form: str) -> None:
    one, other = (named("weather", {"city": city}) for city in ("Rome", "Paris"))
    text = SEVERAL[form].format(one, other)
    wanted = [("weather", {"city": "Rome"}), ("weather", {"city": "Paris"})]
    assert calls_of(parse(list(text), form)) == wanted
    cut = text[: text.index("Paris") + 3]
    deltas = parse(list(cut), form)
    assert calls_of(deltas) == wanted[:1]
    assert "Par" in said(deltas)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json_tools", '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>'),
        ("json_tools", '<tool_call>{"name": "weather", "parameters": {"city": "Rome"}}</tool_call>'),
        (
            "json_tools",
            '<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}',
        ),
        ("json_tools", '<tool_call>\n```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```\n</tool_call>'),
        ("json_tools", '{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
        ("json_tools", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]'),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome"}'),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"),
        ("qwen3_coder", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'),
        ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
        ("kimi_k2", kimi_k2("weather", {"city": "Rome"}).replace("tool_calls_section", "tool_call_section")),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>',
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
            '{"city": "Rome"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ),
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}'),
        ("llama3", "[weather(city='Rome')]"),
        ("llama4", '[weather(city="Rome")]'),
        ("llama4", '{"name": "weather", "parameters": {"city": "Rome"}}'),
        ("llama4_json", '{"name": "weather", "parameters": {"city": "Rome"}}'),
        ("llama4_json", '<|python_start|>[weather(city="Rome")]<|python_end|>'),
        ("phi4_mini", 'functools[{"name": "weather", "arguments": {"city": "Rome"}}]'),
        (
            "deepseek_v3",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("harmony", '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'),
        ("harmony", '<|channel|>analysis to=functions.weather<|message|>{"city": "Rome"}<|call|>'),
        ("gemma4", '<|tool_call>call:weather{\n"city": "Rome"\n}<tool_call|>'),
    ],
)
def test_other_ways_to_write_a_call(form: str, text: str) -> None:
    deltas = parse(list(text), form)
    assert (calls_of(deltas), said(deltas)) == ([("weather", {"city": "Rome"})], "")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>gibberish</tool_call>",
        '<tool_call>{"name": "king", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}, "arguments": {"x": 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {}, "city": "Rome"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        '<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>',
        '<tool_call>{"arguments": {"city": "a", "city": "b"}, "name": "weather"}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_malformed_call_is_text_as_the_model_wrote_it(text: str) -> None:
    deltas = parse([f"Look: {text} There."])
    assert (said(deltas), calls_of(deltas)) == (f"Look: {text} There.", [])


EXAMPLE = qwen3_coder("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    "content",
    [
        "A block ends with </parameter> here.",
        "</parameter>\n</function>",
        "if x:\n</function>\nend",
        "Write <parameter=path> first",
        "<parameter=path>\nb\n</parameter>",
        "<tool_call> opens it, </tool_call> closes it",
        f"Like this:\n{EXAMPLE}\nand so on",
        f"{EXAMPLE}\n{EXAMPLE}\nand so on",
        EXAMPLE,
    ],
)
def test_tags_in_a_value_are_part_of_it(content: str) -> None:
    arguments = {"path": "a", "content": content}
    after = [("write_file", arguments), ("weather", {"city": "Rome"})]
    whole = f"{qwen3_coder('write_file', arguments)}\n{EXAMPLE}"
    assert calls_of(parse(list(whole), "qwen3_coder")) == after
    assert calls_of(parse([qwen3_coder("write_file", arguments)], "qwen3_coder")) == after[:1]


# -- text and thoughts -------------------------------------------------------------------------------------------------


def test_thinking_is_apart_and_white_space_around_it_dropped() -> None:
    for text, thinking in (("<think>\nHm, a < b.\n</think>\n\nYes. ", False), ("Hm, a < b.\n</think>\n\nYes. ", True)):
        deltas = parse(list(text), thinking=thinking)
        assert (said(deltas, Thinking), said(deltas)) == ("Hm, a < b.", "Yes. ")


def test_a_tag_of_thoughts_in_the_text_is_text() -> None:
    text = "Use `<think>draft</think>` as the example."
    for before in ("", "<think>\nI explain.\n</think>\n\n"):
        assert said(parse(list(before + text))) == text


def test_after_the_only_call_that_is_wanted_nothing_follows() -> None:
    text = 'I ask. <tool_call>{"name": "say"}</tool_call> <tool_call>{"name": "weather"}</tool_call> Done.'
    both = parse([text])
    assert [name for name, _ in calls_of(both)] == ["say", "weather"]
    assert said(both) == "I ask. Done."
    one = parse([text], one_call=True)
    assert (calls_of(one), said(one)) == ([("say", {})], "I ask.")


def test_text_goes_out_as_it_comes_and_a_call_when_it_is_complete() -> None:
    parser = new_parser("json_tools")
    assert parser.feed("I look. <to") == [Text("I look.")]
    assert parser.feed('ol_call>{"name": "weather", "arguments": {"city": "Ro') == []
    assert parser.feed('me"}}</tool_call') == []
    [call] = parser.feed(">")
    assert isinstance(call, ToolCall)
    assert (call.index, call.name, call.text) == (0, "weather", '{"city": "Rome"}')
    assert parser.calls_made == 1


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "Hm.",
            "Yes.",
        ),
        ("<|channel|>final<|message|>Yes.", "", "Yes."),
        ("<|channel|>??<|message|>Yes.", "", "Yes."),
        ("<|channel|>commentary to=assistant<|channel|>commentary<|message|>Yes.", "", "Yes."),
        ("<|message|>Yes.", "", "<|message|>Yes."),
        ("Yes.", "", "Yes."),
        ("<|channel|>analysis<|message|>Hm", "Hm", ""),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.",
            "One.Two.",
            "",
        ),
        ("<|channel|>final<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B", "", "A\n\nB"),
        ("<|channel|>final", "", "<|channel|>final"),
        (
            "<|channel|>commentary to=functions.king <|constrain|>json<|message|>{}<|call|>",
            "",
            "<|channel|>commentary to=functions.king <|constrain|>json<|message|>{}",
        ),
    ],
)
def test_messages_of_harmony(text: str, thoughts: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        deltas = parse(pieces, "harmony")
        assert (said(deltas, Thinking), said(deltas), calls_of(deltas)) == (thoughts, answer, [])


# -- anything ----------------------------------------------------------------------------------------------------------

TAGS = sorted(
    {tag for form in FORMATS.values() for tag in form.tags} | {tag for tags in THOUGHTS.values() for tag in tags}
)
WHOLE = [write("weather", {"city": "Rome"}) for write in WRITTEN.values()]
PIECES = st.sampled_from(
    [
        *TAGS,
        *WHOLE,
        *("<think>", "</think>", "weather", "weather[ARGS]", '{"city": "Zürich"}', '"', "}", "{", "]", "(", ")", ","),
        *(
            '{"name": "weather", "arguments": {"city": "B\\"}{"}}',
            '{"name": "say", "arguments": {',
            "say(",
            "city=",
            "'",
        ),
        *('{"name": "king", "arguments": {}}', "<function=weather>", "<parameter=city>\nRome\n</parameter>", "city:"),
        *(
            "<",
            "<th",
            "</",
            "tool_call>",
            " ",
            "\n\n",
            "Hello",
            "a < b",
            "NaN",
            "\\ud800",
            '{"name": "say"}',
            "null",
            "`",
        ),
    ]
)
LETTERS, ANY_JSON = Constraint("regex", ".*"), Constraint("json_schema", "{}")
HELD = [
    StructuredOutput(thinking, "", "", text)
    for thinking in ("never", "may", "open")
    for text in (None, "free", LETTERS, ANY_JSON)
]


@given(
    pieces=st.lists(PIECES, max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=60),
    form=st.sampled_from(sorted(FORMATS)),
    some_tools=st.booleans(),
    thinking=st.booleans(),
    one_call=st.booleans(),
    held=st.sampled_from([None, None, *HELD]),
)
@example(["<tool_call>", "<tool_call>", WHOLE[0]], [], "json_tools", True, True, False, None)
def test_the_deltas_do_not_depend_on_the_cuts(
    pieces: list[str],
    cuts: list[int],
    form: str,
    some_tools: bool,
    thinking: bool,
    one_call: bool,
    held: StructuredOutput | None,
) -> None:
    text, tools = "".join(pieces), TOOLS if some_tools else []
    at = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    options: dict[str, Any] = {"thinking": thinking, "one_call": one_call, "held": held, "tools": tools}
    whole = parse([text], form, **options)
    for cut in ([text[a:b] for a, b in itertools.pairwise(at)], list(text)):
        assert uncut(parse(cut, form, **options)) == uncut(whole)
    calls = calls_of(whole)
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    assert len(calls) <= 1 or not one_call
    if not calls:
        everything = said(whole, Thinking) + said(whole)
        assert sorted(squeezed(everything, form)) == sorted(squeezed(text, form))
    for _, arguments in calls:
        for value in leaves(arguments):
            assert as_json(value)[1:-1] in text or value in text, (value, text)


@pytest.mark.parametrize(("brackets", "is_call"), [(98, True), (300, False)])
def test_a_call_that_is_nested_too_deep_is_text(brackets: int, is_call: bool) -> None:
    value = "[" * brackets + "]" * brackets
    text = f'<tool_call>{{"name": "say", "arguments": {{"text": {value}}}}}</tool_call>'
    deltas = parse([text])
    assert [name for name, _ in calls_of(deltas)] == ["say"] * is_call
    assert said(deltas) == ("" if is_call else text)


def leaves(value: Any) -> Iterator[str]:
    """The strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)


ANY_TEXT = st.text(st.sampled_from("ab<>/\"'\\{}[]()=,:; \n\té|"), max_size=12)


@given(form=st.sampled_from(sorted(WRITTEN)), parts=st.lists(ANY_TEXT | PIECES, max_size=4), count=st.integers())
def test_any_string_is_read_as_it_was_written_or_the_call_is_text(form: str, parts: list[str], count: int) -> None:
    arguments = {"text": "".join(parts), "count": count}
    written = WRITTEN[form]("mixed", arguments)
    deltas = parse([written], form)
    quote = {"gemma4": GEMMA_QUOTE, "function_gemma": "<escape>"}.get(form)
    if quote is not None:  # in a string, the tag is a quotation mark
        arguments = {"text": "".join(parts).replace(quote, '"'), "count": count}
    if calls_of(deltas) != [("mixed", arguments)]:
        assert not any(name == "mixed" for name, _ in calls_of(deltas)), calls_of(deltas)


def test_command_rs_ids_are_not_used_because_they_begin_again_in_each_turn() -> None:
    deltas = parse([WRITTEN["command_r"]("weather", {"city": "Rome"})], "command_r")
    [call] = [delta for delta in deltas if isinstance(delta, ToolCall)]
    assert call.call_id.startswith("call_")


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (
            "harmony",
            '<|channel|>commentary to=functions.weather <|constrain|>json{"city": "Oslo"}<|channel|>commentary '
            'to=functions.say <|constrain|>json<|message|>{"zone": "x"}<|call|>',
            [("say", {"zone": "x"})],
        ),
        (
            "harmony",
            "<|start|>assistant\n\nI look.\n<|channel|>commentary to=functions.say<|message|>{}<|call|>",
            [("say", {})],
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" I look.'
            "<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            [],
        ),
        ("harmony", f"<|channel|>commentary to=functions.{'x' * 500}<|message|>{{}}", []),
        ("kimi_k3", f'<|open|>tools<|sep|><|open|>call tool="say" {"x" * 300}<|sep|><|close|>call<|sep|>', []),
    ],
)
def test_text_in_a_header_or_in_a_tag_is_not_lost(form: str, text: str, calls: list[Any]) -> None:
    deltas = parse([text], form)
    assert calls_of(deltas) == calls
    for word in ("Oslo", "I look.", "xxx"):
        assert (word in said(deltas)) == (word in text)
    assert uncut(parse(list(text), form)) == uncut(deltas)


def test_all_complete_calls_before_a_cut_one_are_kept() -> None:
    cities = ("Rome", "Oslo", "Paris")
    for separator, around in (("\n", "<tool_call>{}"), (", ", "<tool_call>[{}")):
        text = around.format(separator.join(named("weather", {"city": city}) for city in cities))
        deltas = parse(list(text[: text.index("Paris") + 3]))
        assert calls_of(deltas) == [("weather", {"city": city}) for city in cities[:2]]
        assert "Par" in said(deltas)


@pytest.mark.parametrize("form", ["glm47", "qwen3_coder", "minimax_m2", "seed_oss"])
def test_an_argument_that_the_tool_does_not_have_makes_a_call_text(form: str) -> None:
    """It may be invented, or the text of the value before it. JSON tells them apart, and the client refuses it."""
    text = WRITTEN[form]("weather", {"city": "Rome", "unknown": "x"})
    assert (calls_of(parse([text], form)), said(parse([text], form))) == ([], text)
    assert calls_of(parse([WRITTEN["json_tools"]("weather", {"city": "Rome", "unknown": "x"})])) == [
        ("weather", {"city": "Rome", "unknown": "x"})
    ]
