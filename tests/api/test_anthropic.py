"""The Messages API with the official client, on a model that really thinks and calls tools."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, Background, StepGate, raw, side_by_side, within_one_step
from tests.api.test_tools import CALL, ROME
from tests.support import RunningServer, running_server

THOUGHT = "They want the weather."
SCRIPT = {
    "Hello": "Hello there, friend. Goodbye.",
    "Rome?": f"<think>\n{THOUGHT}\n</think>\nLet me look.\n{CALL}",
    "Both?": f"{CALL}\n{CALL}",
    "Broken?": 'So: <tool_call>{"name": "weather", "arguments": {"city": ]}</tool_call>',
    "Error: no such city": "It failed.",
    "21 degrees": "It is 21 degrees.",
    "Long?": f"<think>{'so ' * 60}</think>Yes.",
    "<think>\n\n</think>": "At once.",
    "The best is (": "B)",
    "Nothing?": "",
}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {"city": {}}}},
    {"name": "clock", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture
def client(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client
    server.wait_idle(DEADLINE)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 2000, "messages": [{"role": "user", "content": text}]} | fields


def dumped(message: Any) -> dict[str, Any]:
    """Without what is another one each time."""
    fields: dict[str, Any] = message.to_dict()
    for block in fields["content"]:
        block.pop("id", None)
    return {name: value for name, value in fields.items() if name not in ("id", "usage", "stop_details")}


def both_ways(client: Anthropic, request: dict[str, Any]) -> Any:
    """The message, after making sure that a stream adds up to the same."""
    with client.messages.stream(**request) as stream:
        streamed, whole = side_by_side(stream.get_final_message, lambda: client.messages.create(**request))
    assert dumped(streamed) == dumped(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def test_a_message_has_all_its_fields(client: Anthropic) -> None:
    message = both_ways(client, body("Hello"))
    assert message.id.startswith("msg")
    assert message._request_id == message.id
    assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
    (block,) = message.content
    assert (block.type, block.text) == ("text", SCRIPT["Hello"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(SCRIPT["Hello"]) + 1


def test_the_events_come_in_anthropics_order(client: Anthropic) -> None:
    stream = client.messages.create(**body("Rome?", tools=TOOLS), stream=True)
    events = [event.to_dict() for event in stream]
    kinds = [
        event.get("delta", {}).get("type") or event.get("content_block", {}).get("type") or event["type"]
        for event in events
    ]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        *("message_start", "thinking", "thinking_delta", "signature_delta", "content_block_stop"),
        *("text", "text_delta", "content_block_stop"),
        *("tool_use", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2]
    assert kinds.count("input_json_delta") == 1  # a call is sent when it is complete
    start, last = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 1)
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] > 100


def test_a_ping_follows_the_first_block(server: RunningServer) -> None:
    with raw(server) as http:
        response = http.post(
            "/v1/messages", json=body("Hello", stream=True), headers={"anthropic-version": "2023-06-01"}
        )
    assert response.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert names == [json.loads(line[6:])["type"] for line in response.text.splitlines() if line.startswith("data: ")]


def test_thinking_text_and_a_call_are_blocks_and_their_result_makes_an_answer(client: Anthropic) -> None:
    request = body("Rome?", tools=TOOLS)
    message = both_ways(client, request)
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == (THOUGHT, "Let me look.")
    assert thinking.signature
    assert (call.name, call.input, message.stop_reason) == ("weather", json.loads(ROME), "tool_use")
    for is_error, content, expected in (
        (False, [{"type": "text", "text": "21 degrees"}], "It is 21 degrees."),
        (True, "no such city", "It failed."),
    ):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content, "is_error": is_error}
        later = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        answer = both_ways(client, request | {"messages": request["messages"] + later})
        assert (answer.content[0].text, answer.stop_reason) == (expected, "end_turn")


def test_several_calls_or_only_one(client: Anthropic) -> None:
    assert [block.type for block in both_ways(client, body("Both?", tools=TOOLS)).content] == ["tool_use"] * 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(both_ways(client, body("Both?", tools=TOOLS, tool_choice=choice)).content) == 1
    # What they cut off is not shown, or is no text.
    for fields, reason in (({"max_tokens": 80}, "max_tokens"), ({"stop_sequences": ["\n<tool_call>"]}, "tool_use")):
        assert both_ways(client, body("Both?", tools=TOOLS, **fields)).stop_reason == reason
        one = both_ways(client, body("Both?", tools=TOOLS, tool_choice=choice, **fields))
        assert (one.stop_reason, one.stop_sequence) == ("tool_use", None)
    message = both_ways(client, body("Both?", tools=TOOLS, tool_choice={"type": "none"}))
    assert [block.text for block in message.content] == [SCRIPT["Both?"]]


def test_a_malformed_call_is_text(client: Anthropic) -> None:
    message = client.messages.create(**body("Broken?", tools=TOOLS))
    assert [block.text for block in message.content] == [SCRIPT["Broken?"]]  # type: ignore[union-attr]
    assert message.stop_reason == "end_turn"
    with client.messages.stream(**body("Broken?", tools=TOOLS, max_tokens=20)) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_stop_sequences_and_limits_say_what_ended_the_answer(client: Anthropic) -> None:
    message = both_ways(client, body("Hello", stop_sequences=["nowhere", ". G", "Goodbye"]))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "Hello there, friend", "stop_sequence", ". G",
    )  # fmt: skip
    message = both_ways(client, body("Hello", max_tokens=5, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3}))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("Hello", "max_tokens", None)


def test_an_empty_answer_has_no_blocks(client: Anthropic) -> None:
    message = both_ways(client, body("Nothing?"))
    assert (message.content, message.stop_reason) == ([], "end_turn")


def test_an_answer_goes_on_from_a_prefill(client: Anthropic) -> None:
    request = body("A or B?")
    request["messages"].append({"role": "assistant", "content": "The best is ("})
    assert both_ways(client, request).content[0].text == "B)"


def test_thinking_can_be_limited_and_switched(client: Anthropic) -> None:
    limited = both_ways(client, body("Long?", thinking={"type": "enabled", "budget_tokens": 100}))
    assert limited.content[0].thinking == ("so " * 60)[:100].rstrip()
    assert limited.content[1].type == "text"
    free = both_ways(client, body("Long?", thinking={"type": "adaptive"}))
    assert (len(free.content[0].thinking), free.content[1].text) == (179, "Yes.")
    none = both_ways(client, body("Long?", thinking={"type": "disabled"}))
    assert [block.text for block in none.content] == ["At once."]


def test_usage_tells_what_was_cached_and_counting_agrees(client: Anthropic) -> None:
    request = body(
        "Hello",
        system=[{"type": "text", "text": "x" * 150, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tools=TOOLS,
        thinking={"type": "adaptive"},
    )
    first, second = client.messages.create(**request).usage, client.messages.create(**request).usage
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert second.cache_read_input_tokens == total - 1, "its last token is computed, for the answer"
    assert second.input_tokens + second.cache_read_input_tokens == total
    counted = {name: value for name, value in request.items() if name != "max_tokens"}
    assert client.messages.count_tokens(**counted).input_tokens == total
    less = client.messages.count_tokens(model="scripted", messages=request["messages"]).input_tokens
    assert less < total - 150


def test_users_texts_that_follow_each_other_are_one_turn(client: Anthropic) -> None:
    apart = [{"role": "user", "content": "One"}, {"role": "user", "content": [{"type": "text", "text": "Two"}]}]
    joined = [{"role": "user", "content": "One\nTwo"}]
    sizes = {client.messages.count_tokens(model="scripted", messages=m).input_tokens for m in (apart, joined)}  # type: ignore[arg-type]
    assert len(sizes) == 1


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> tuple[str, str, int]:
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
            whole = await client.messages.create(**body("Hello", metadata={"user_id": "me"}))
            async with client.messages.stream(**body("Hello", service_tier="standard_only")) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            tokens = await client.messages.count_tokens(model="scripted", messages=body("Hello")["messages"])
            return whole.content[0].text, text, tokens.input_tokens  # type: ignore[union-attr]

    whole, streamed, tokens = asyncio.run(ask())
    assert whole == streamed == SCRIPT["Hello"]
    assert tokens > 5


def test_without_tokens_for_an_answer_only_the_prompt_is_cached(demo_server: RunningServer) -> None:
    """So Anthropic's clients warm the cache up."""
    with Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        request = body("How are you? " * 50, model="demo")
        for text in ("streamed", "whole"):
            warm = request | {"system": f"{text} " * 50, "max_tokens": 0}
            if text == "whole":
                message = client.messages.create(**warm)
            else:
                with client.messages.stream(**warm) as stream:
                    message = stream.get_final_message()
            assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
            asked = client.messages.create(**warm | {"max_tokens": 1})
            assert asked.usage.cache_read_input_tokens > message.usage.input_tokens / 2


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "b", "content": "x"}
IMPOSSIBLE = TOOLS[0] | {"input_schema": {"not": {}}, "strict": True}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [1]}, "stop_sequences.0"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0: role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: images are not supported"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [IMPOSSIBLE], "tool_choice": {"type": "any"}}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "king"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": 5}}, "thinking: type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_had_is_refused_in_anthropics_format(
    client: Anthropic, fields: dict[str, Any], named: str
) -> None:
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**body("Hello"), extra_body=fields, stream=stream)
        answer: Any = caught.value.body
        assert list(answer) == ["type", "error", "request_id"]
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert named in answer["error"]["message"]
        assert answer["request_id"] == caught.value.request_id


def test_a_model_that_does_not_think_says_so(demo_server: RunningServer) -> None:
    with Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        request = body("Hello", model="demo", max_tokens=50)
        answer = client.messages.with_raw_response.create(**request, thinking={"type": "enabled", "budget_tokens": 20})
        assert answer.headers["x-mlxpaged-ignored"] == "thinking"
        assert client.messages.create(**request, thinking={"type": "disabled"}).content[0].type == "text"


def test_other_failures_have_anthropics_format_too(server: RunningServer, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**body("Hello", model="claude"))
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with raw(server) as http:
        for response, status, kind in (
            (http.get("/v1/messages"), 405, "invalid_request_error"),
            (http.post("/v1/messages/nothing"), 404, "not_found_error"),
            (http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
            (http.post("/v1/messages", content=b" " * (33 << 20)), 413, "request_too_large"),
        ):
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
            assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        for path in ("/v1/message", "/v1/messagesx"):
            assert "type" not in http.get(path).json()
            assert "request-id" not in http.get(path).headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_ended_fails_in_anthropics_format(server: RunningServer, stream: bool) -> None:
    with StepGate(server) as gate:
        headers = {"X-Request-Id": "mine"}
        pending = Background.request(server, "POST", "/v1/messages", json=body("Hello", stream=stream), headers=headers)
        gate.allow(4)
        assert within_one_step(server, gate, "DELETE", "/v1/requests/mine").status_code == 200
        gate.open()
        response = pending.result()
    text = response.text.split("event: error\ndata: ")[1] if stream else response.text
    failure = json.loads(text)
    assert (failure["type"], failure["error"]["type"], failure["request_id"]) == ("error", "api_error", "mine")
    assert "cancelled" in failure["error"]["message"]
    assert "message_stop" not in response.text
    server.wait_idle(DEADLINE)


def test_a_server_that_cannot_serve_says_whether_to_come_back() -> None:
    with (
        running_server(None) as server,
        Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(anthropic.InternalServerError) as caught,
    ):
        client.messages.create(**body("Hello"))
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    config = EngineConfig(kv_cache_bytes=2_000_000, max_num_seqs=1, max_queue=0)
    with running_server(config) as server, StepGate(server) as gate:
        pending = Background.request(server, "POST", "/v1/messages", json=body("Hello", model="demo", max_tokens=3))
        gate.wait_held()
        with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.InternalServerError) as caught:
                client.messages.create(**body("Hello", model="demo"))
            assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]
        gate.open()
        assert pending.result().json()["stop_reason"] == "max_tokens"
