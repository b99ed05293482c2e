"""What only a grammar can promise, on models that tend to something else: the calls that `tool_choice` requires,
arguments that fit the schemas of strict tools, structured output beside tools and after thinking."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError, OpenAI

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, side_by_side, tokens_of
from tests.api.test_tools import streamed
from tests.scripted import SPELLED, demo_with_tools, follow, scripted_server
from tests.support import RunningServer, running_server

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
SPELLED_TAG = f"</{SPELLED}tool_call> <{SPELLED}tool_call>"
TAG_INSIDE = CALL.replace("Rome", SPELLED_TAG)
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": 7}}\n</tool_call>'
THOUGHT = "They want 2 < 3."

SCRIPT = {
    "Hello": "Hello there, I will not call anything.",
    "Rome?": CALL,
    "Both?": f"{CALL}\n{CLOCK}",
    "Wrong?": f"Let me see: {WRONG}",
    "King?": '<tool_call>\n{"name": "king", "arguments": {}}\n</tool_call>',
    "Tag?": TAG_INSIDE,
    "Spelled?": f"I use <{SPELLED}tool_call>, <{SPELLED}think>.",
    "Why?": f"<think>\n{THOUGHT}\n</think>\n\nBecause it is so.",
    "Why call?": f"<think>\n{THOUGHT}\n</think>\n\n{CALL}",
    "Spelled thought?": f"<think>x</{SPELLED}think>y</think>Because.",
    "Silent?": "<think>hm",
    "Long?": f"<think>{'ü' * 20}</think>Yes.",
    "Json?": '{"city": "Oslo", "days": 3}',
    "Json with tags?": f'{{"city": "<{SPELLED}think><{SPELLED}tool_call>", "days": 1}}',
    "Always?<|im_end|>\n<|im_start|>assistant\n<think>\n": f"{THOUGHT}</think>Done.",
    "<think>\n\n</think>": "<think>At once.",
    "<think>I wonder": f": {THOUGHT}</think>Done.",
}

MISTRAL = {
    "Hello": "Hello there.",
    "Both?": 'I ask: [TOOL_CALLS]weather[ARGS]{"city": "[TOOL\0_CALLS]", "days": 1}[TOOL_CALLS]clock[ARGS]{}',
}


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


TOOLS = [tool("weather", CITY), tool("clock")]
STRICT = [tool("weather", CITY, strict=True), tool("clock", strict=True)]
NAMED = {"type": "function", "function": {"name": "weather"}}
JSON = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], "seed": 1, "max_tokens": 4000}
    return body | fields


def both_ways(client: OpenAI, body: dict[str, Any]) -> dict[str, Any]:
    """content, thinking, calls as (name, arguments) and finish_reason: the same whole and streamed, side by side."""
    completion, got = side_by_side(lambda: client.chat.completions.create(**body), lambda: streamed(client, body))
    choice = completion.choices[0]
    message = choice.message
    whole = {
        "content": message.content or "",
        "thinking": getattr(message, "reasoning_content", ""),
        "calls": [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()],
        "finish_reason": choice.finish_reason,
    }
    assert whole == {
        "content": got["content"],
        "thinking": got["reasoning_content"],
        "calls": [(call["name"], json.loads("".join(call["pieces"]))) for call in got["calls"]],
        "finish_reason": got["finish_reason"],
    }
    return whole


def check_calls(calls: list[tuple[str, Any]], names: set[str]) -> None:
    assert calls
    for name, arguments in calls:
        assert name in names
        if name == "weather":
            jsonschema.validate(arguments, CITY)
        else:
            assert arguments == {}


# -- tool_choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Hello", "Wrong?", "King?", "Spelled?", "Silent?"])
def test_a_required_call_is_made_whatever_the_model_wants_to_say(client: OpenAI, text: str) -> None:
    answer = both_ways(client, ask(text, tools=TOOLS, tool_choice="required"))
    check_calls(answer["calls"], {"weather", "clock"})
    assert (answer["content"], answer["finish_reason"]) == ("", "tool_calls")


@pytest.mark.parametrize("text", ["Hello", "Wrong?", "Both?"])
def test_the_named_tool_is_called_once(client: OpenAI, text: str) -> None:
    answer = both_ways(client, ask(text, tools=TOOLS, tool_choice=NAMED))
    check_calls(answer["calls"], {"weather"})
    assert (len(answer["calls"]), answer["content"], answer["finish_reason"]) == (1, "", "stop")


@pytest.mark.parametrize("text", ["Hello", "Both?", "Silent?"])
def test_one_of_the_allowed_tools_is_called_where_one_is_required(client: OpenAI, text: str) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [clock]}}
    answer = both_ways(client, ask(text, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False))
    assert (answer["calls"], answer["content"], answer["finish_reason"]) == ([("clock", {})], "", "tool_calls")


def test_a_model_that_makes_the_calls_makes_its_own(client: OpenAI) -> None:
    made = [("weather", {"city": "Rome", "days": 2}), ("clock", {})]
    body = ask("Both?", tools=TOOLS, tool_choice="required")
    assert both_ways(client, body)["calls"] == made
    assert both_ways(client, body | {"parallel_tool_calls": False})["calls"] == made[:1]


def test_a_tag_in_a_string_is_part_of_it(client: OpenAI) -> None:
    for fields in ({"tool_choice": "required"}, {"tools": STRICT}):
        answer = both_ways(client, ask("Tag?", **{"tools": TOOLS} | fields))
        city = SPELLED_TAG.replace(SPELLED, "")
        assert (answer["calls"], answer["content"]) == ([("weather", {"city": city, "days": 2})], "")


def test_thinking_comes_before_a_required_call(client: OpenAI) -> None:
    answer = both_ways(client, ask("Why call?", tools=TOOLS, tool_choice="required"))
    assert (answer["thinking"], answer["calls"]) == (THOUGHT, [("weather", {"city": "Rome", "days": 2})])
    answer = both_ways(client, ask("Why?", tools=TOOLS, tool_choice="required"))
    assert (answer["thinking"], answer["content"]) == (THOUGHT, "")
    check_calls(answer["calls"], {"weather", "clock"})


def test_several_choices_each_make_their_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ask("Hello", tools=TOOLS, tool_choice="required", n=3))
    made = [[(c.function.name, json.loads(c.function.arguments)) for c in a.message.tool_calls or ()]
            for a in answer.choices]  # fmt: skip
    for calls in made:
        check_calls(calls, {"weather", "clock"})
    assert len({json.dumps(calls) for calls in made}) > 1


def test_a_call_that_max_tokens_cuts_off_is_text(client: OpenAI) -> None:
    answer = both_ways(client, ask("Rome?", tools=TOOLS, tool_choice="required", max_tokens=20))
    assert (answer["calls"], answer["finish_reason"]) == ([], "length")
    assert answer["content"].startswith('<tool_call>\n{"name": "w')


# -- strict tools that may be called -------------------------------------------------------------------------------


def test_a_call_of_a_strict_tool_fits_its_schema_and_text_is_free(client: OpenAI) -> None:
    answer = both_ways(client, ask("Wrong?", tools=STRICT))
    check_calls(answer["calls"], {"weather", "clock"})
    assert (answer["content"], answer["finish_reason"]) == ("Let me see:", "tool_calls")
    free = both_ways(client, ask("Wrong?", tools=TOOLS))
    assert free["calls"] == [("weather", {"town": 7})]
    answer = both_ways(client, ask("Hello", tools=STRICT))
    assert (answer["content"], answer["calls"]) == (SCRIPT["Hello"], [])
    answer = both_ways(client, ask("Why call?", tools=STRICT))
    assert (answer["thinking"], answer["calls"]) == (THOUGHT, [("weather", {"city": "Rome", "days": 2})])


def test_one_call_of_strict_tools_where_no_parallel_ones_are_wanted(client: OpenAI) -> None:
    assert len(both_ways(client, ask("Both?", tools=STRICT))["calls"]) == 2
    assert len(both_ways(client, ask("Both?", tools=STRICT, parallel_tool_calls=False))["calls"]) == 1


def test_a_tag_that_is_spelled_does_not_begin_what_the_grammar_does_not_know_of(client: OpenAI) -> None:
    answer = both_ways(client, ask("Spelled?", tools=STRICT))
    assert (answer["thinking"], answer["calls"]) == ("", [])
    assert answer["content"].startswith("I use <tool_call")
    assert "<tool_call>" not in answer["content"]


# -- structured output ---------------------------------------------------------------------------------------------


def test_beside_tools_the_answer_is_calls_or_the_structured_text(client: OpenAI) -> None:
    for text in ("Rome?", "Both?", "Why call?", "Tag?"):
        answer = both_ways(client, ask(text, tools=STRICT, response_format=JSON))
        assert (answer["content"], answer["finish_reason"]) == ("", "tool_calls")
        check_calls(answer["calls"], {"weather", "clock"})
    for text in ("Json?", "Json with tags?"):
        answer = both_ways(client, ask(text, tools=TOOLS, response_format=JSON))
        assert answer["content"] == SCRIPT[text].replace(SPELLED, "")
        assert (answer["calls"], answer["finish_reason"]) == ([], "stop")
    for seed in range(2):
        answer = both_ways(client, ask("Hello", tools=STRICT, response_format=JSON, seed=seed))
        if answer["calls"]:
            assert answer["content"] == ""
        else:
            jsonschema.validate(json.loads(answer["content"]), CITY)


def test_beside_a_required_call_there_is_no_structured_text(client: OpenAI) -> None:
    answer = both_ways(client, ask("Json?", tools=TOOLS, response_format=JSON, tool_choice="required"))
    check_calls(answer["calls"], {"weather", "clock"})
    answer = both_ways(client, ask("Json?", tools=TOOLS, response_format=JSON, tool_choice="none"))
    assert answer["content"] == SCRIPT["Json?"]


@pytest.mark.parametrize(
    ("text", "extra", "thought"),
    [
        ("Why?", {}, THOUGHT),
        ("Why?", {"thinking_budget": 1000}, THOUGHT),
        ("Why?", {"thinking_budget": 7}, THOUGHT[:6]),
        ("Long?", {"thinking_budget": 8}, "üüüü"),
        ("Long?", {"thinking_budget": 9}, "üüüüü"),
        ("Always?", {"chat_template_kwargs": {"always_think": True}}, THOUGHT),
        ("Always?", {"chat_template_kwargs": {"always_think": True}, "thinking_budget": 4}, THOUGHT[:4]),
        ("Why?", {"chat_template_kwargs": {"enable_thinking": False}}, ""),
        ("Json?", {}, ""),
    ],
)
def test_the_text_after_the_thinking_fits(client: OpenAI, text: str, extra: dict[str, Any], thought: str) -> None:
    for tools in ([], TOOLS):
        answer = both_ways(client, ask(text, response_format=JSON, tools=tools, extra_body=extra))
        assert answer["thinking"] == thought
        if not answer["calls"]:
            jsonschema.validate(json.loads(answer["content"]), CITY)
    pattern = r"\n {2}[xy]{3}<z>\n"
    answer = both_ways(client, ask(text, extra_body=extra | {"guided_regex": pattern}))
    assert answer["thinking"] == thought
    assert re.fullmatch(pattern, answer["content"])
    answer = both_ways(client, ask(text, tools=TOOLS, tool_choice="required", extra_body=extra))
    assert answer["thinking"] == thought
    check_calls(answer["calls"], {"weather", "clock"})


def test_an_answer_does_not_end_in_thought(client: OpenAI) -> None:
    answer = both_ways(client, ask("Silent?", response_format=JSON))
    assert answer["thinking"].startswith("hm")
    jsonschema.validate(json.loads(answer["content"]), CITY)


def test_a_closing_tag_that_is_spelled_closes_too(client: OpenAI) -> None:
    """The client sees no difference, so the text after it is the answer."""
    answer = both_ways(client, ask("Spelled thought?", response_format=JSON))
    assert answer["thinking"].startswith("x</think")
    jsonschema.validate(json.loads(answer["content"]), CITY)


def test_a_thought_goes_on_from_the_last_message(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "<think>I wonder"}]
    extra = {"continue_final_message": True}
    answer = both_ways(client, ask("", messages=messages, response_format=JSON, extra_body=extra))
    assert answer["thinking"] == f": {THOUGHT}"
    jsonschema.validate(json.loads(answer["content"]), CITY)


# -- other formats and refusals ------------------------------------------------------------------------------------


def test_calls_are_enforced_in_mistrals_format(tmp_path: Any) -> None:
    with scripted_server(tmp_path, "mistral", MISTRAL) as server, server.client(timeout=DEADLINE) as client:
        for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": STRICT}):
            answer = both_ways(client, ask("Both?", **{"tools": TOOLS} | fields))
            check_calls(answer["calls"], {"weather", "clock"})
            assert len(answer["calls"]) == (1 if fields.get("tool_choice") == NAMED else 2)
            assert answer["content"] == ("I ask:" if "tools" in fields else "")
        check_calls(both_ways(client, ask("Hello", tools=TOOLS, tool_choice="required"))["calls"], {"weather", "clock"})
        answer = both_ways(client, ask("Hello", tools=STRICT, response_format=JSON, seed=5))
        assert answer["calls"] or jsonschema.validate(json.loads(answer["content"]), CITY) is None


def test_tags_that_are_no_tokens_are_enforced_letter_by_letter(tmp_path: Path) -> None:
    model = demo_with_tools(tmp_path)
    config = EngineConfig(model=str(model), served_model_name="scripted", kv_cache_bytes=16_000_000)
    with running_server(config) as server, server.client(timeout=DEADLINE) as client:
        follow(
            server, {text: SCRIPT[text].replace(SPELLED, "") for text in ("Hello", "Both?", "Wrong?", "Tag?", "Json?")}
        )
        options: dict[str, Any] = {"max_tokens": 1500}
        for text in ("Hello", "Both?", "Wrong?", "Tag?"):
            answer = both_ways(client, ask(text, tools=TOOLS, tool_choice="required", **options))
            check_calls(answer["calls"], {"weather", "clock"})
            assert answer["content"] == ""
        answer = both_ways(client, ask("Wrong?", tools=STRICT, **options))
        check_calls(answer["calls"], {"weather"})
        assert answer["content"] == "Let me see:"
        assert both_ways(client, ask("Hello", tools=STRICT, **options))["content"] == SCRIPT["Hello"]
        assert len(both_ways(client, ask("Both?", tools=STRICT, **options))["calls"]) == 2
        for text, content in (("Json?", SCRIPT["Json?"]), ("Both?", "")):
            answer = both_ways(client, ask(text, tools=STRICT, response_format=JSON, **options))
            assert (answer["content"], len(answer["calls"])) == (content, 0 if content else 2)


ESCAPED = {
    "Accent?": r'{"city": "caf\u00e9", "days": 1}',
    "Quote?": r'{"city": "it\u2019s", "days": 1}',
    "Pair?": r'{"city": "\ud83d\ude42 \uD834\uDD1E", "days": 1}',
    "Slash?": r'{"city": "a\/b <\/p>", "days": 1}',
    "Control?": r'{"city": "\u0009\t\b\f\r\n\"\\", "days": 1}',
}


def test_a_model_may_write_every_escape_of_json(tmp_path: Path) -> None:
    call = '<tool_call>\n{{"name": "weather", "arguments": {}}}\n</tool_call>'
    script = {question: call.format(text) for question, text in ESCAPED.items()}
    pattern = CITY | {"properties": CITY["properties"] | {"city": {"type": "string", "pattern": r"[\s\S]+"}}}
    forms = [JSON, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "c", "schema": pattern}}]
    with scripted_server(tmp_path, "json_tools", script) as server, server.client(timeout=DEADLINE) as client:
        for question, text in ESCAPED.items():
            body = ask(question, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
            assert both_ways(client, body)["calls"] == [("weather", json.loads(text))]
        follow(server, ESCAPED)
        for form in forms:
            for question, text in ESCAPED.items():
                answer = both_ways(client, ask(question, response_format=form))
                assert (answer["content"], answer["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_is_cut_of_a_second_call_is_no_text(client: OpenAI, server: RunningServer, choice: str) -> None:
    whole = len(tokens_of(server, CALL))
    for more in (1, 2, 3, 20):
        body = ask("Both?", tools=TOOLS, tool_choice=choice, max_tokens=whole + more)
        answer = both_ways(client, body)
        assert (answer["content"], answer["finish_reason"]) == ("", "length"), more
        check_calls(answer["calls"], {"weather"})


def test_a_model_that_must_call_invents_no_arguments(tmp_path: Path) -> None:
    """A tool that says nothing of other arguments has none. A map has any keys."""
    invented = '{"city": "Rome", "type": "string", "properties": {"city": {}}, "where": {"any": 1}}'
    script = {"Rome?": f'<tool_call>\n{{"name": "weather", "arguments": {invented}}}\n</tool_call>'}
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    place = {"type": "object", "properties": {"city": {"type": "string"}, "where": {"type": "object"}}}
    with scripted_server(tmp_path, "json_tools", script) as server, server.client(timeout=DEADLINE) as client:
        for choice in ("required", NAMED):
            body = ask("Rome?", tools=[tool("weather", city)], tool_choice=choice, parallel_tool_calls=False)
            assert both_ways(client, body)["calls"] == [("weather", {"city": "Rome"})]
        body = ask("Rome?", tools=[tool("weather", city, strict=True)], parallel_tool_calls=False)
        assert both_ways(client, body)["calls"] == [("weather", {"city": "Rome"})]
        open_to_all = [tool("weather", city | {"additionalProperties": True})]
        body = ask("Rome?", tools=open_to_all, tool_choice=NAMED)
        assert both_ways(client, body)["calls"] == [("weather", json.loads(invented))]
        [(_, arguments)] = both_ways(client, ask("Rome?", tools=[tool("weather", place)], tool_choice=NAMED))["calls"]
        assert arguments.keys() <= {"city", "where"}


ANY_NAMES = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}
"""Arguments of any names have no place in a format that lists them."""


NAMED_F = {"type": "function", "function": {"name": "f"}}


def test_what_a_format_cannot_express_is_refused_where_it_must_be_enforced(tmp_path: Any) -> None:
    loose, strict = tool("f", ANY_NAMES), tool("g", ANY_NAMES, strict=True)
    with scripted_server(tmp_path, "minimax_m2", SCRIPT) as server, server.client(timeout=DEADLINE) as client:
        create = client.chat.completions.with_raw_response.create
        with pytest.raises(BadRequestError, match="minimax_m2: arguments with any names cannot") as caught:
            create(**ask("Hello", tools=[strict], tool_choice="required"))
        assert caught.value.param == "tools.0"
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED_F]}}
        for fields, named in (
            ({"tools": [loose, strict]}, "tools.strict"),
            ({"tools": [loose], "response_format": JSON}, None),
            ({"tools": [strict, loose], "tool_choice": allowed}, None),
        ):
            answer = create(**ask("Json?", **fields))
            assert answer.headers.get("x-mlxpaged-ignored") == named
            assert answer.parse().choices[0].message.content


@pytest.mark.parametrize("form", ["qwen3_coder", "glm47", "longcat"])
def test_such_arguments_are_json_where_the_format_has_that_too(tmp_path: Any, form: str) -> None:
    with scripted_server(tmp_path, form, SCRIPT) as server, server.client(timeout=DEADLINE) as client:
        body = ask("Hello", tools=[tool("f", ANY_NAMES)], tool_choice="required", max_tokens=400)
        [choice] = client.chat.completions.create(**body).choices
        for call in choice.message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), ANY_NAMES)
        assert choice.finish_reason == "length" or choice.message.tool_calls


BAD_SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "not": {"required": ["a"]}}, "'not' cannot be enforced; it is at 'the root'"),
    ({"type": "array"}, "the type of the parameters must be 'object', got 'array'"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required property 'a' is unsatisfiable"),
    ({"type": "object", "properties": {"a": {"pattern": "ab" * 5000}}}, "patterns of 10000 characters"),
]


@pytest.mark.parametrize(("parameters", "reason"), BAD_SCHEMAS)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    client: OpenAI, parameters: dict[str, Any], reason: str
) -> None:
    tools = [tool("clock"), tool("f", parameters, strict=True)]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**ask("Hello", tools=tools, tool_choice="required"))
    assert caught.value.param == "tools.1"
    assert reason in caught.value.message


@pytest.mark.parametrize("parameters", [parameters for parameters, _ in BAD_SCHEMAS[:3]])
def test_a_strict_tool_that_need_not_be_called_is_named_instead(client: OpenAI, parameters: dict[str, Any]) -> None:
    """Its neighbours are held to their schemas."""
    tools = [*STRICT, tool("f", parameters, strict=True)]
    answer = client.chat.completions.with_raw_response.create(**ask("Wrong?", tools=tools))
    named = "tools.parameters.not" if "not" in parameters else "tools.strict"
    assert answer.headers["x-mlxpaged-ignored"] == named
    for call in answer.parse().choices[0].message.tool_calls or ():
        jsonschema.validate(json.loads(call.function.arguments), CITY if call.function.name == "weather" else {})


@pytest.mark.parametrize("name", ["answer", "part_0", "part_2"])
def test_a_grammar_cannot_refer_to_what_it_is_put_into(client: OpenAI, name: str) -> None:
    extra = {"guided_grammar": f"start: @{name}"}
    for tools in ([], TOOLS):
        with pytest.raises(BadRequestError, match=f"unknown grammar @{name}") as caught:
            client.chat.completions.create(**ask("Hello", tools=tools, extra_body=extra))
        assert caught.value.param == "guided_grammar"


def test_what_only_looks_hard_is_enforced(client: OpenAI) -> None:
    """A null in a schema, references to its root, names that begin alike, and one that is a choice's."""
    nothing = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"], "additionalProperties": False}
    tree = {
        "type": "object",
        "properties": {"leaf": {"enum": [1]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["leaf", "next"],
        "additionalProperties": False,
    }
    tools = [tool("get", nothing), tool("get.x", tree), tool("auto", nothing)]
    for name, schema in (("get", nothing), ("get.x", tree), ("auto", nothing)):
        choice = {"type": "function", "function": {"name": name}}
        ((called, arguments),) = both_ways(client, ask("Hello", tools=tools, tool_choice=choice))["calls"]
        assert called == name
        jsonschema.validate(arguments, schema)


# -- the other client, and both asynchronously ---------------------------------------------------------------------

ANTHROPIC: list[Any] = [
    {"name": "weather", "input_schema": CITY},
    {"name": "clock", "input_schema": {"type": "object"}},
]


def message_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 4000, "messages": [{"role": "user", "content": text}]} | fields


def uses(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message. Only they and thinking may come after its text."""
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_the_messages_api_enforces_the_same(server: RunningServer) -> None:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            for text in ("Hello", "Both?", "Wrong?"):
                body = message_body(text, tools=[ANTHROPIC[0]], tool_choice=choice)
                with client.messages.stream(**body) as stream:
                    for message in side_by_side(stream.get_final_message, lambda: client.messages.create(**body)):  # noqa: B023
                        ((name, arguments),) = uses(message)
                        check_calls([(name, arguments)], {"weather"})
                        assert message.stop_reason == "tool_use"
        message = client.messages.create(**message_body("Both?", tools=ANTHROPIC, tool_choice={"type": "any"}))
        assert [name for name, _ in uses(message)] == ["weather", "clock"]
        strict = [ANTHROPIC[0] | {"strict": True}]
        message = client.messages.create(**message_body("Wrong?", tools=strict))
        assert message.content[0].type == "text"
        check_calls(uses(message), {"weather"})
        thinking = {"type": "enabled", "budget_tokens": 6}
        body = message_body("Why?", tools=ANTHROPIC[:1], tool_choice={"type": "any"}, thinking=thinking)
        message = client.messages.create(**body)
        assert message.content[0].thinking == THOUGHT[:4]  # type: ignore[union-attr]
        check_calls(uses(message), {"weather"})
        unsupported = [{"name": "f", "input_schema": {"type": "object", "not": {"required": ["a"]}}, "strict": True}]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.0: .*not"):
            client.messages.create(**message_body("Hello", tools=unsupported, tool_choice={"type": "any"}))
        deferred = [ANTHROPIC[0] | {"defer_loading": True}, *unsupported]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.1: .*not"):
            client.messages.create(**message_body("Hello", tools=deferred, tool_choice={"type": "any"}))
        with pytest.raises(
            anthropic.BadRequestError, match="tool_choice: requires a tool call, but the request has no tools"
        ):
            client.messages.create(**message_body("Hello", tool_choice={"type": "any"}))


def test_the_asynchronous_clients(server: RunningServer) -> None:
    async def both() -> tuple[Any, Any]:
        async with (
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE) as openai,
            AsyncAnthropic(base_url=server.url, api_key="none", timeout=DEADLINE) as claude,
        ):
            body = ask("Hello", tools=TOOLS, tool_choice="required")
            choice = {"type": "tool", "name": "weather"}
            stream = claude.messages.stream(**message_body("Hello", tools=ANTHROPIC, tool_choice=choice))
            async with stream as messages:
                return await openai.chat.completions.create(**body), await messages.get_final_message()

    completion, message = asyncio.run(both())
    calls = completion.choices[0].message.tool_calls
    check_calls([(call.function.name, json.loads(call.function.arguments)) for call in calls], {"weather", "clock"})
    check_calls(uses(message), {"weather"})
