"""Ollama's own Python package, and LiteLLM's provider for Ollama's API."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import fetches a table of prices
import litellm
import ollama
import pytest

from tests.clients.conftest import REPLY
from tests.support import RunningServer

pytestmark = pytest.mark.clients

MODEL = "scripted:latest"


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city
    """
    return f"21 degrees in {city}"


@pytest.fixture
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(host=server.url, trust_env=False)


def asked(text: str) -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_a_conversation_is_answered_with_counts_and_times(client: ollama.Client) -> None:
    answer = client.chat(MODEL, asked("Hello"), options={"num_ctx": 8192, "temperature": 0})
    assert (answer.message.content, answer.done_reason, answer.model) == ("Hello there.", "stop", MODEL)
    assert answer.eval_count == len("Hello there.") + 1
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0


def test_the_chunks_of_a_stream_add_up(client: ollama.Client) -> None:
    chunks = list(client.chat(MODEL, asked("Hello"), stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Hello there."
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    generated = client.generate(MODEL, "Hello", system="Be brief.", stream=True)
    assert "".join(chunk.response for chunk in generated) == "Hello there."


def test_the_asynchronous_client_too(server: RunningServer) -> None:
    async def ask() -> str | None:
        client = ollama.AsyncClient(host=server.url, trust_env=False)
        answer = await client.chat(MODEL, asked("Hello"))
        return answer.message.content

    assert asyncio.run(ask()) == "Hello there."


def test_a_tool_is_called_and_its_result_is_answered(client: ollama.Client) -> None:
    messages = asked("Weather in Rome?")
    answer = client.chat(MODEL, messages, tools=[weather], think=True)
    assert answer.message.thinking == "I should look."
    [call] = answer.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    messages += [
        answer.message,
        {"role": "tool", "content": weather(**call.function.arguments), "tool_name": "weather"},
    ]
    assert client.chat(MODEL, messages, tools=[weather]).message.content == "It is 21 degrees in Rome."


def test_an_answer_has_the_form_that_was_asked_for(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}}}
    answer = client.chat(MODEL, asked("Describe Rome"), format=schema)
    assert json.loads(answer.message.content or "") == json.loads(REPLY)


def test_models_are_listed_shown_and_loaded(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [MODEL]
    assert [model.model for model in client.ps().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.modelinfo or {})["llama.context_length"] > 0
    assert client.generate(MODEL, keep_alive="5m").done_reason == "load"


def test_errors_are_those_of_the_package(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as error:
        client.chat("other", asked("Hello"))
    assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="chosen when it starts"):
        client.pull("llama3.2")


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_reaches_it_as_ollama(server: RunningServer, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "ollama_chat/scripted", "api_base": server.url, "max_tokens": 50}
    answer: Any = litellm.completion(messages=asked("Hello"), stream=stream, **fields)
    if stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "Hello there."
    else:
        assert answer.choices[0].message.content == "Hello there."
        assert answer.usage.completion_tokens == len("Hello there.") + 1


def test_litellm_passes_tools_on(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_API_BASE", server.url)  # where it asks whether the model takes tools
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}
    answer: Any = litellm.completion(
        model="ollama_chat/scripted", api_base=server.url, messages=asked("Weather in Rome?"), tools=[tool]
    )
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
