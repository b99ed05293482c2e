"""/v1/responses with structured output and required calls, with the official client, on a model that tends to something
else."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from tests.api.helpers import side_by_side
from tests.api.test_structured_output import CITY, SCRIPT, THOUGHT  # noqa: F401  (SCRIPT is for the server)


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": parameters} | fields


TOOLS = [tool("weather", CITY), tool("clock")]
CLOCK = {"type": "function", "name": "clock"}


def ask(question: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "input": question,
        "temperature": 0,
        "max_output_tokens": 4000,
        "tools": TOOLS,
    } | fields


def calls(client: OpenAI, body: dict[str, Any]) -> list[ResponseFunctionToolCall]:
    """Checked against the tools, and the same in a stream."""
    with client.responses.stream(**body) as stream:
        last, response = side_by_side(stream.get_final_response, lambda: client.responses.create(**body))
    made = [item for item in response.output if item.type == "function_call"]
    for call in made:
        jsonschema.validate(json.loads(call.arguments), CITY if call.name == "weather" else {"const": {}})
    streamed = [(item.name, item.arguments) for item in last.output if item.type == "function_call"]
    assert streamed == [(call.name, call.arguments) for call in made]
    return made


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [CLOCK]}, {"clock"}),
    ],
)
@pytest.mark.parametrize("text", ["Hello", "Wrong?"])
def test_a_call_that_is_wanted_is_made(client: OpenAI, text: str, choice: Any, names: set[str]) -> None:
    made = calls(client, ask(text, tool_choice=choice, parallel_tool_calls=False))
    assert len(made) == 1
    assert {call.name for call in made} <= names


def test_allowed_tools_leave_a_call_of_another_one_no_way(client: OpenAI) -> None:
    strict = [tool("weather", CITY, strict=True), tool("clock", strict=True)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK]}
    response = client.responses.create(**ask("Rome?", tools=strict, tool_choice=choice, max_output_tokens=300))
    assert {item.name for item in response.output if item.type == "function_call"} <= {"clock"}


def test_strict_tools_hold_their_arguments(client: OpenAI) -> None:
    assert calls(client, ask("Rome?", tools=[tool("weather", CITY, strict=True)]))[0].name == "weather"
    calls(client, ask("Wrong?", tools=[tool("weather", CITY, strict=True)]))
    loose = client.responses.create(**ask("Wrong?"))
    assert json.loads(loose.output[-1].arguments) == {"town": 7}  # type: ignore[union-attr]


def test_thinking_comes_before_a_call_or_a_form(client: OpenAI) -> None:
    thought, call = client.responses.create(**ask("Why call?", tool_choice="required")).output
    assert (thought.type, thought.content[0].text, call.type) == ("reasoning", THOUGHT, "function_call")  # type: ignore[union-attr, index]
    form = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    limited = client.responses.create(**ask("Long?", tools=[], text=form, reasoning={"effort": "minimal"}))
    assert limited.output[0].type == "reasoning"
    jsonschema.validate(json.loads(limited.output_text), CITY)
    both = client.responses.create(**ask("Json?", text=form))
    assert json.loads(both.output_text) == {"city": "Oslo", "days": 3}
    assert calls(client, ask("Rome?", text=form))[0].name == "weather"


class weather(BaseModel):
    city: str
    days: int


def test_the_official_client_parses_calls_and_answers(client: OpenAI) -> None:
    function = pydantic_function_tool(weather)["function"]
    flat: Any = {"type": "function", **function}
    called = client.responses.parse(**ask("Rome?", tools=[flat]), text_format=weather).output[0]
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"city": "Rome", "days": 2}
    answered = client.responses.parse(**ask("Json?", tools=[flat]), text_format=weather)
    assert answered.output_parsed == weather(city="Oslo", days=3)


def test_a_schema_that_cannot_be_held_is_named_by_its_place(client: OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [tool("f", bad, strict=True)]}
    for tools, param in (([TOOLS[0], namespace], "tools.1.tools.0"), ([tool("f", bad, strict=True)], "tools.0")):
        answer = client.responses.with_raw_response.create(**ask("Hello", tools=tools))
        assert answer.headers["x-mlxpaged-ignored"] == re.sub(r"\.\d+", "", f"{param}.parameters.not")
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(**ask("Hello", tools=tools, tool_choice="required"))
        assert caught.value.param == param
        assert str(caught.value.body["message"]).startswith(f"{param}: ")  # type: ignore[index]
