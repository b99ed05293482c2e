"""OpenAI's Agents SDK: its runner calls a function tool, over chat completions and over responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import agents
import pytest
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.support import RunningServer

pytestmark = pytest.mark.clients
agents.set_tracing_disabled(True)


class Weather(BaseModel):
    city: str
    degrees: int


def look_up(city: str) -> str:
    """The weather in a city."""
    assert city == "Rome"
    return "21 degrees"


def tool(strict: bool) -> Any:
    return agents.function_tool(look_up, name_override="weather", strict_mode=strict)


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel], ids=["chat", "responses"])
def run(request: pytest.FixtureRequest, server: RunningServer) -> Callable[..., Any]:
    """The result of an agent with these fields; in a stream or not."""

    async def run(question: str, stream: bool, fields: dict[str, Any]) -> Any:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            model = request.param(model="scripted", openai_client=client)
            agent = agents.Agent(name="agent", instructions="Be brief.", model=model, **fields)
            if not stream:
                return await agents.Runner.run(agent, question)
            result = agents.Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return result

    def now(question: str, stream: bool = False, **fields: Any) -> Any:
        coroutine: Awaitable[Any] = run(question, stream, fields)
        return asyncio.run(coroutine)  # type: ignore[arg-type]

    return now


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_is_answered(run: Callable[..., Any], stream: bool) -> None:
    assert run("Hello", stream).final_output == "Hello there."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_tool_is_called_and_its_result_answered(run: Callable[..., Any], stream: bool, strict: bool) -> None:
    """strict is the SDK's default."""
    result = run("Weather in Rome?", stream, tools=[tool(strict)])
    assert result.final_output.strip() == "It is 21 degrees in Rome."
    assert [type(item).__name__ for item in result.new_items if "Tool" in type(item).__name__] == [
        "ToolCallItem",
        "ToolCallOutputItem",
    ]


def test_a_tool_can_be_demanded_with_effort_and_limits(run: Callable[..., Any]) -> None:
    settings = agents.ModelSettings(
        tool_choice="required",
        temperature=0.0,
        max_tokens=200,
        parallel_tool_calls=False,
        reasoning=Reasoning(effort="low"),
    )
    result = run("Weather in Rome?", tools=[tool(False)], model_settings=settings)
    assert result.final_output.strip() == "It is 21 degrees in Rome."


def test_an_object_is_asked_for(run: Callable[..., Any]) -> None:
    assert run("Describe Rome", output_type=Weather).final_output == Weather(city="Rome", degrees=21)


def test_an_object_is_asked_for_beside_tools(run: Callable[..., Any]) -> None:
    assert run("Describe Rome", output_type=Weather, tools=[tool(True)]).final_output.degrees == 21
