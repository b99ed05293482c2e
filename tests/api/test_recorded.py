"""What real clients send, as recorded in tests/api/recorded/, is accepted and answered in the format that they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses
import pytest

from tests.api.helpers import DEADLINE, events, raw
from tests.scripted import scripted_server
from tests.support import RunningServer

RECORDED = Path(__file__).parent / "recorded"

THOUGHT = "I think about it."


def records() -> list[Any]:
    return [
        pytest.param(record, id=f"{path.stem}: {record['name']}")
        for path in sorted(RECORDED.glob("*.json"))
        for record in json.loads(path.read_text())["requests"]
    ]


@pytest.fixture(scope="module")
def says() -> dict[str, str]:
    """The script: the next answer to every question is the text under ""."""
    return {"": ""}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, says: dict[str, str]) -> Iterator[RunningServer]:
    options = {"context_length": 65536, "kv_cache_bytes": 32_000_000}
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", says, **options) as server:
        yield server


@pytest.mark.parametrize("record", records())
def test_a_recorded_request_is_answered(server: RunningServer, says: dict[str, str], record: dict[str, Any]) -> None:
    body = record.get("body", {})
    said = says[""] = answer_of(record["answer"], body)
    with raw(server) as client:
        response = client.request(
            record["method"], record["path"], headers=record["headers"], json=body or None, timeout=DEADLINE
        )
    if isinstance(record["answer"], int):  # a probe, whose answer the client does not read
        assert response.status_code == record["answer"]
        return
    assert response.status_code == 200, response.text
    path = record["path"].partition("?")[0]
    if record["answer"] in ("models", "count"):
        answer = response.json()
        if path == "/api/tags":
            assert answer["models"][0]["model"] == "scripted:latest"
        else:
            assert answer["data"][0]["id"] == "scripted" if path == "/v1/models" else answer["input_tokens"] > 0
        return
    read = READERS[path]
    text, calls = read(response, bool(body.get("stream")), body)
    if record["answer"] == "call":
        tool = called_tool(body)
        assert calls == [(tool["name"], instance(parameters(tool)))]
    elif record["answer"] == "json":
        assert json.loads(text) == json.loads(said)
    else:
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        assert (text, calls) == ("It is done."[:limit], [])  # a token is a letter


# What the model is made to say


def answer_of(kind: str | int, body: dict[str, Any]) -> str:
    if kind == "json":
        return json.dumps(instance(schema_of(body)))
    thinks = body.get("think") or body.get("thinking") or body.get("reasoning") or body.get("reasoning_effort")
    thought = f"<think>\n{THOUGHT}\n</think>\n" if thinks else ""
    if kind != "call":
        return f"{thought}It is done."
    tool = called_tool(body)
    call = {"name": tool["name"], "arguments": instance(parameters(tool))}
    return f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"


def called_tool(body: dict[str, Any]) -> dict[str, Any]:
    """The first of the request."""
    tool: dict[str, Any] = body["tools"][0]
    return tool.get("function", tool)


def parameters(tool: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = tool.get("parameters") or tool["input_schema"]
    return schema


def schema_of(body: dict[str, Any]) -> dict[str, Any]:
    """The schema of the answer, in any of the APIs."""
    chat = body.get("response_format", {})
    if "format" in body:
        ollama_schema: dict[str, Any] = body["format"]
        return ollama_schema
    format = (
        chat.get("json_schema")
        or body.get("text", {}).get("format")
        or body.get("output_config", {}).get("format")
        or {"schema": {"type": "object"}}
    )
    schema: dict[str, Any] = format["schema"]
    return schema


def instance(schema: dict[str, Any]) -> dict[str, Any]:
    """The least that fits the schema of an object."""
    values = {"string": "Rome", "integer": 21, "number": 21, "boolean": True}
    return {name: values[schema["properties"][name]["type"]] for name in schema.get("required", ())}


# What came back: (text, [(name of a called tool, its arguments)])

Answer = tuple[str, list[tuple[str, Any]]]


def chat(response: httpx.Response, stream: bool, body: dict[str, Any]) -> Answer:
    if not stream:
        answer = openai.types.chat.ChatCompletion.model_validate(response.json()).choices[0].message
        return answer.content or "", [named(call.function) for call in answer.tool_calls or ()]
    *parts, done = events(response.iter_lines())
    assert done == "[DONE]"
    chunks = [openai.types.chat.ChatCompletionChunk.model_validate(data) for data in parts]
    usage = chunks[-1].usage is not None
    assert usage == bool((body.get("stream_options") or {}).get("include_usage"))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    functions = [call.function for delta in deltas for call in delta.tool_calls or () if call.function is not None]
    names = [function.name for function in functions if function.name]
    arguments = "".join(function.arguments or "" for function in functions)
    return "".join(delta.content or "" for delta in deltas), [(name, json.loads(arguments)) for name in names]


def completion(response: httpx.Response, stream: bool, body: dict[str, Any]) -> Answer:
    if not stream:
        if not body.get("echo"):
            return openai.types.Completion.model_validate(response.json()).choices[0].text, []
        choice = response.json()["choices"][0]  # the type does not know that the first token has no log-probability
        assert len(choice["logprobs"]["token_logprobs"]) == len(body["prompt"][0]) + body["max_tokens"]
        return choice["text"][-body["max_tokens"] :], []
    *parts, done = events(response.iter_lines())
    assert done == "[DONE]"
    return "".join(choice["text"] for part in parts for choice in part["choices"]), []  # null ends do not fit the type


def message(response: httpx.Response, stream: bool, body: dict[str, Any]) -> Answer:
    if not stream:
        blocks = anthropic.types.Message.model_validate(response.json()).content
    else:
        blocks = []
        for event in checked(response, anthropic.types.RawMessageStreamEvent):
            if event.type == "content_block_start":
                blocks.append(event.content_block)
                written = ""
            elif event.type == "content_block_delta":
                kind = event.delta.type.removesuffix("_delta")
                if kind == "input_json":
                    written += event.delta.partial_json
                    blocks[-1].input = json.loads(written) if written.endswith("}") else {}
                else:
                    setattr(blocks[-1], kind, getattr(blocks[-1], kind) + getattr(event.delta, kind))
        assert event.type == "message_stop"
    thinking = [block.thinking for block in blocks if block.type == "thinking"]
    if "thinking" in body:
        assert thinking == ([""] if body["thinking"].get("display") == "omitted" else [THOUGHT])
    text = "".join(block.text for block in blocks if block.type == "text")
    return text.strip(), [(block.name, block.input) for block in blocks if block.type == "tool_use"]


def responses(response: httpx.Response, stream: bool, body: dict[str, Any]) -> Answer:
    if stream:
        *_, last = checked(response, openai.types.responses.ResponseStreamEvent)
        assert last.type == "response.completed"
        answer = last.response
    else:
        answer = openai.types.responses.Response.model_validate(response.json())
    calls = [named(item) for item in answer.output if item.type == "function_call"]
    return answer.output_text.strip(), calls


def ollama(response: httpx.Response, stream: bool, body: dict[str, Any]) -> Answer:
    """Without "stream": false, Ollama's answers are lines."""
    parts = [json.loads(line) for line in response.iter_lines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    if "messages" not in body:
        return "".join(part["response"] for part in parts), []
    messages = [part["message"] for part in parts]
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    text = "".join(message["content"] for message in messages)
    return text, [(function["name"], function["arguments"]) for function in functions]


READERS = {
    "/api/chat": ollama,
    "/api/generate": ollama,
    "/v1/chat/completions": chat,
    "/v1/completions": completion,
    "/v1/messages": message,
    "/v1/responses": responses,
}


def named(call: Any) -> tuple[str, Any]:
    return call.name, json.loads(call.arguments)


def checked(response: httpx.Response, union: Any) -> Iterator[Any]:
    """The events, each of which must fit the official client's description of its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    models = {get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(union)[0])}
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = json.loads(line.removeprefix("data: "))
            if data["type"] != "ping":  # the official client does not describe it
                yield models[data["type"]].model_validate(data)
