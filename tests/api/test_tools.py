"""Tools over chat completions, with the official client, on a model that really writes the calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.api.helpers import DEADLINE, raw
from tests.scripted import scripted_server
from tests.support import RunningServer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}

ROME = '{"city": "Rome, \\"Lazio\\""}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
SCRIPT = {
    "Rome?": CALL,
    "21 degrees": "It is 21 degrees in Rome.",
    "Both?": f'I ask both.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>',
    "Broken?": 'I try. <tool_call>\n{"name": "weather", "arguments": {"city": ]}\n</tool_call>',
    "King?": '<tool_call>{"name": "king", "arguments": {}}</tool_call>',
    "Hello": "Hello <b>there</b>.",
}

MISTRAL = {
    "Rome?": f"[TOOL_CALLS]weather[ARGS]{ROME}",
    "Both?": f"Wait.[TOOL_CALLS]clock[ARGS]{{}}[TOOL_CALLS]weather[ARGS]{ROME}",
}
GEMMA = {"Rome?": "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>"}


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], "tools": [WEATHER, CLOCK]} | fields


def streamed(client: OpenAI, body: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    """The message that the deltas make, with the pieces of each call's arguments, as OpenAI documents them."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for chunk in client.chat.completions.create(**body, stream=True):
        for part in chunk.choices:
            if part.index != choice:
                continue
            message["content"] += part.delta.content or ""
            message["reasoning_content"] += getattr(part.delta, "reasoning_content", "") or ""
            for call in part.delta.tool_calls or ():
                if call.id is not None:
                    assert (call.type, call.index) == ("function", len(message["calls"]))
                    message["calls"].append({"id": call.id, "name": call.function.name, "pieces": []})
                message["calls"][call.index]["pieces"].append(call.function.arguments)
            message["finish_reason"] = part.finish_reason or message["finish_reason"]
    return message


def test_a_call_and_its_result_make_an_answer(client: OpenAI) -> None:
    body = question("Rome?")
    choice = client.chat.completions.create(**body).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        json.loads(ROME),
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    body["messages"] += [choice.message.model_dump(exclude_unset=True), result]
    answer = client.chat.completions.create(**body).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is 21 degrees in Rome.", "stop")
    assert answer.message.tool_calls is None


def test_tools_calls_and_results_are_in_the_prompt(client: OpenAI, server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ROME}}
    messages: list[Any] = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "21 degrees"}]},
    ]
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
    assert answer.usage is not None
    tokenizer = server.engine.info.tokenizer  # type: ignore[union-attr]
    rendered = f"""<|im_start|>system
{json.dumps(WEATHER)}<|im_end|>
<|im_start|>user
Rome?<|im_end|>
<|im_start|>assistant
{CALL}<|im_end|>
<|im_start|>tool
21 degrees<|im_end|>
<|im_start|>assistant
"""
    assert answer.usage.prompt_tokens == len(tokenizer.encode(rendered))


def test_a_call_is_streamed_when_it_is_complete(client: OpenAI) -> None:
    """First its id and name, then its arguments as they are written. Until then, it may turn out to be text."""
    message = streamed(client, question("Rome?"))
    (call,) = message["calls"]
    assert (call["name"], call["pieces"]) == ("weather", ["", ROME])
    assert (message["finish_reason"], message["content"]) == ("tool_calls", "")


def test_several_calls_beside_text(client: OpenAI) -> None:
    body = question("Both?")
    choice = client.chat.completions.create(**body).choices[0]
    assert choice.message.content == "I ask both."
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["weather", "clock"]
    message = streamed(client, body)
    assert message["content"] == "I ask both."
    assert [(call["name"], "".join(call["pieces"])) for call in message["calls"]] == [
        ("weather", ROME),
        ("clock", "{}"),
    ]
    assert len({call["id"] for call in message["calls"]}) == 2


def test_one_call_where_no_parallel_ones_are_wanted(client: OpenAI) -> None:
    body = question("Both?", parallel_tool_calls=False)
    message = client.chat.completions.create(**body).choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["weather"]
    assert [call["name"] for call in streamed(client, body)["calls"]] == ["weather"]


def test_what_is_cut_off_after_the_only_call_does_not_count(client: OpenAI) -> None:
    both = client.chat.completions.create(**question("Both?", max_tokens=100)).choices[0]
    assert both.finish_reason == "length"
    body = question("Both?", parallel_tool_calls=False, max_tokens=100)
    assert client.chat.completions.create(**body).choices[0].finish_reason == "tool_calls"
    message = streamed(client, body)
    assert ([call["name"] for call in message["calls"]], message["finish_reason"]) == (["weather"], "tool_calls")


@pytest.mark.parametrize("text", ["Broken?", "King?"])
def test_what_is_no_call_comes_as_text(client: OpenAI, text: str) -> None:
    choice = client.chat.completions.create(**question(text)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (SCRIPT[text], "stop")
    assert choice.message.tool_calls is None
    message = streamed(client, question(text))
    assert message["content"] == SCRIPT[text]
    assert message["finish_reason"] == "stop"


def test_a_call_that_max_tokens_cuts_off_is_text(client: OpenAI) -> None:
    choice = client.chat.completions.create(**question("Rome?", max_tokens=40)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content == CALL.replace("<tool_call>", "#")[:40].replace("#", "<tool_call>")


def test_without_tools_or_with_none_nothing_is_a_call(client: OpenAI) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = client.chat.completions.create(**question("Rome?", **fields)).choices[0]
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_several_choices_and_logprobs(client: OpenAI) -> None:
    body = question("Rome?", n=2, logprobs=True, seed=1)
    answer = client.chat.completions.create(**body)
    assert [[call.function.arguments for call in c.message.tool_calls or ()] for c in answer.choices] == [[ROME]] * 2
    whole = [len(c.logprobs.content or ()) for c in answer.choices if c.logprobs]
    counts = [0, 0]
    for chunk in client.chat.completions.create(**body, stream=True):
        for part in chunk.choices:
            counts[part.index] += len((part.logprobs and part.logprobs.content) or ())
    assert counts == whole == [len(CALL) - len("<tool_call></tool_call>") + 3] * 2
    assert "".join(streamed(client, body, choice=1)["calls"][0]["pieces"]) == ROME


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=DEADLINE) as client:
            whole = await client.chat.completions.create(**question("Rome?"))
            pieces = ""
            async for chunk in await client.chat.completions.create(**question("Rome?", stream=True)):
                for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
                    pieces += call.function.arguments
            return [whole.choices[0].message.tool_calls[0].function.arguments, pieces]

    assert asyncio.run(ask()) == [ROME, ROME]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "king"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ],
)
def test_what_cannot_be_promised_is_refused(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**question("Rome?", **fields))
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "tool_call_id": "call_9", "content": "x"}, "messages.1"),
        (
            {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]},
            "messages.1",
        ),
    ],
)
def test_messages_that_fit_no_call_are_refused(client: OpenAI, message: Any, param: str) -> None:
    body = question("Rome?")
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(**body | {"messages": [*body["messages"], message]})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("role", "named"),
    [
        ("tool", {"tool_call_id": "call_1"}),
        ("tool", {}),
        ("tool", {"name": "weather"}),
        ("tool", {"tool_call_id": "of another server"}),
        ("function", {"name": "weather"}),
    ],
)
def test_a_result_with_any_id_or_none_is_shown_to_the_model(client: OpenAI, role: str, named: dict[str, str]) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": role, "content": "21 degrees"} | named
    body = question("Rome?")
    answer = client.chat.completions.create(**body | {"messages": [*body["messages"], said, result]})
    assert answer.choices[0].message.content == "It is 21 degrees in Rome."


def test_a_call_without_content_is_shown_to_the_model(client: OpenAI) -> None:
    """From mlx-lm's tests of its server: the content of the call's message is null."""
    call = {"id": "123", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages: list[Any] = [
        {"role": "user", "content": "what is 2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "123"},
    ]
    answer = client.chat.completions.create(model="scripted", max_tokens=10, temperature=0.7, messages=messages)
    assert answer.choices


def test_a_model_with_tools_and_thinking_is_listed_as_one(server: RunningServer) -> None:
    with raw(server) as http:
        (model,) = http.get("/v1/models").json()["data"]
    nothing_else = dict.fromkeys(("infill", "rerank", "embeddings", "vision"), False)
    assert (
        model["capabilities"]
        == dict.fromkeys(("chat", "completions", "decisions", "tools", "thinking"), True) | nothing_else
    )


def test_special_tokens_of_a_format_reach_its_parser_only(tmp_path: Any) -> None:
    """Mistral's tags are special tokens, which text hides elsewhere; it has no closing tag."""
    with scripted_server(tmp_path, "mistral", MISTRAL) as server, server.client(timeout=DEADLINE) as client:
        message = streamed(client, question("Rome?"))
        (call,) = message["calls"]
        assert (call["name"], "".join(call["pieces"]), message["content"]) == ("weather", ROME, "")
        choice = client.chat.completions.create(**question("Both?")).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
        assert [call.function.name for call in choice.message.tool_calls or ()] == ["clock", "weather"]
        plain = client.chat.completions.create(**question("Rome?", tools=[])).choices[0]
        assert plain.message.content == f"weather{ROME}"


def test_the_parser_can_be_chosen(tmp_path: Any) -> None:
    """A template that shows another format; --tool-parser says what the calls look like."""
    with (
        scripted_server(tmp_path, "qwen3_coder", GEMMA, tool_parser="function_gemma") as server,
        server.client(timeout=DEADLINE) as client,
    ):
        message = streamed(client, question("Rome?"))
        (call,) = message["calls"]
        assert (call["name"], json.loads("".join(call["pieces"]))) == ("weather", {"city": "Rome"})
