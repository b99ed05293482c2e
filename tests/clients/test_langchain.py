"""LangChain's ChatOpenAI and ChatAnthropic."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.support import RunningServer

pytestmark = pytest.mark.clients


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    assert city == "Rome"
    return "21 degrees"


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    degrees: int


@pytest.fixture(params=["openai", "responses", "anthropic"])
def model(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    if request.param == "anthropic":
        return ChatAnthropic(model="scripted", base_url=server.url, api_key="unused", max_retries=0)  # type: ignore[call-arg]
    return ChatOpenAI(
        model="scripted",
        base_url=f"{server.url}/v1",
        api_key="unused",
        max_retries=0,
        use_responses_api=request.param == "responses",
    )


def test_a_conversation_is_answered(model: Any) -> None:
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage("Hello")])
    assert answer.text == "Hello there."
    assert answer.usage_metadata["output_tokens"] == len("Hello there.") + 1  # the end's


def test_the_chunks_of_a_stream_add_up(model: Any) -> None:
    chunks = list(model.stream("Hello"))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == "Hello there."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_tool_is_called_and_its_result_answered(model: Any, stream: bool, strict: bool) -> None:
    bound = model.bind_tools([weather], strict=True) if strict else model.bind_tools([weather])
    messages: list[Any] = [HumanMessage("Weather in Rome?")]
    for _ in range(2):
        chunks = list(bound.stream(messages)) if stream else [bound.invoke(messages)]
        answer = chunks[0]
        for chunk in chunks[1:]:
            answer += chunk
        messages.append(answer)
        messages += [weather.invoke(made) for made in answer.tool_calls]
    assert [message.type.removesuffix("MessageChunk").lower() for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == "It is 21 degrees in Rome."


@pytest.mark.parametrize("choice", ["weather", "any"])
def test_a_tool_can_be_demanded(model: Any, choice: str) -> None:
    (made,) = model.bind_tools([weather], tool_choice=choice).invoke("Weather in Rome?").tool_calls
    assert (made["name"], made["args"]) == ("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("method", "question"),
    [("json_schema", "Describe Rome"), ("json_mode", "Describe Rome"), ("function_calling", "Describe it")],
)
def test_an_object_is_asked_for(model: Any, method: str, question: str) -> None:
    if method == "json_mode" and not isinstance(model, ChatOpenAI):
        pytest.skip("ChatAnthropic has no JSON mode")
    answer = model.with_structured_output(Weather, method=method).invoke(question)
    assert answer == Weather(city="Rome", degrees=21)


def test_the_older_interface_completes_text(server: RunningServer) -> None:
    model = OpenAI(model="scripted", base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    assert model.invoke("Hello") == "Hello there."
