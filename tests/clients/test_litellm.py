"""LiteLLM, over each of the providers that reach a server like this one."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a table of prices
import litellm
import pytest

from tests.support import RunningServer

pytestmark = pytest.mark.clients

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def fields(request: pytest.FixtureRequest, server: RunningServer) -> dict[str, Any]:
    base = server.url if request.param == "anthropic" else f"{server.url}/v1"
    return {"model": f"{request.param}/scripted", "api_base": base, "api_key": "unused", "max_retries": 0}


def asked(text: str) -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_a_conversation_is_answered(fields: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=asked("Hello"), temperature=0, max_tokens=50, **fields)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello there.", "stop")
    assert answer.usage.completion_tokens == len("Hello there.") + 1


def test_the_asynchronous_call_too(fields: dict[str, Any]) -> None:
    answer: Any = asyncio.run(litellm.acompletion(messages=asked("Hello"), **fields))
    assert answer.choices[0].message.content == "Hello there."


def test_the_chunks_of_a_stream_add_up(fields: dict[str, Any]) -> None:
    chunks = list(
        litellm.completion(messages=asked("Hello"), stream=True, stream_options={"include_usage": True}, **fields)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    assert chunks[-1].usage.completion_tokens == len("Hello there.") + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_answered(fields: dict[str, Any], stream: bool) -> None:
    messages = asked("Weather in Rome?")
    for _ in range(2):
        answer: Any = litellm.completion(messages=messages, tools=[TOOL], tool_choice="auto", stream=stream, **fields)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        for made in message.tool_calls or ():
            assert (made.function.name, json.loads(made.function.arguments)) == ("weather", {"city": "Rome"})
            messages.append({"role": "tool", "tool_call_id": made.id, "name": "weather", "content": "21 degrees"})
    assert message.content == "It is 21 degrees in Rome."
    assert messages[2].reasoning_content.strip() == "I should look."


def test_a_tool_can_be_demanded(fields: dict[str, Any]) -> None:
    answer: Any = litellm.completion(messages=asked("Weather in Rome?"), tools=[TOOL], tool_choice="required", **fields)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_an_object_is_asked_for(fields: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    if fields["model"].startswith("anthropic/"):
        pytest.skip("LiteLLM asks Anthropic's unknown models by a tool of its own")
    answer: Any = litellm.completion(messages=asked("Describe Rome"), response_format=form, **fields)
    assert json.loads(answer.choices[0].message.content) == {"city": "Rome", "degrees": 21}


def test_responses_and_messages_by_their_own_calls(server: RunningServer) -> None:
    response: Any = litellm.responses(
        model="openai/scripted", api_base=f"{server.url}/v1", api_key="unused", input="Hello"
    )
    assert response.output[0].content[0].text == "Hello there."
    message: Any = asyncio.run(
        litellm.anthropic.messages.acreate(
            messages=[{"role": "user", "content": "Hello"}],
            model="anthropic/scripted",
            api_base=server.url,
            api_key="unused",
            max_tokens=50,
        )
    )
    assert message["content"][0]["text"] == "Hello there."
