"""Each API's bodies become the same kind of request: fields come by name, errors name the client's own fields."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.api.anthropic import translation as anthropic
from mlxpaged.api.anthropic.schema import MessagesRequest
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.check import check_request
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.openai import chat, completions
from mlxpaged.api.openai.responses import translation as responses
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.schema import ChatRequest, CompletionRequest
from tests.support import RunningServer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"role": "user", "content": "Hello"}


def of_chat(**fields: Any) -> GenerationRequest:
    return chat.translate(ChatRequest.model_validate({"messages": [USER]} | fields))


def of_responses(**fields: Any) -> GenerationRequest:
    body = ResponseRequest.model_validate({"input": "Hello"} | fields)
    return responses.translate(body, body.items)  # type: ignore[arg-type]


def of_completions(**fields: Any) -> GenerationRequest:
    return completions.translate(CompletionRequest.model_validate({"prompt": "Hello"} | fields))


def test_the_same_question_is_the_same_request_over_every_api(demo_server: RunningServer) -> None:
    assert demo_server.engine.info is not None
    sampling = {"model": "m", "temperature": 0.5, "top_p": 0.9}
    function = {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
    body = MessagesRequest.model_validate(
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "system": "Be brief.",
            "max_tokens": 9,
            "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True}],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            **sampling,
        }
    )
    over_anthropic = anthropic.translate(body, demo_server.engine.info.tokenizer)
    over_responses = of_responses(
        instructions="Be brief.",
        max_output_tokens=9,
        tools=[{"type": "function", **function}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        **sampling,
    )
    over_chat = of_chat(
        messages=[{"role": "system", "content": "Be brief."}, USER],
        max_completion_tokens=9,
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        **sampling,
    )
    assert over_chat.prompt == over_responses.prompt == over_anthropic.prompt
    assert over_chat.params == over_responses.params == over_anthropic.params
    assert over_chat.params.max_tokens == 9


@pytest.mark.parametrize("translate", [of_chat, of_completions])
def test_a_sampling_field_reaches_the_engine_by_its_name(translate: Any) -> None:
    given = {"temperature": 0, "min_p": 0.25, "top_k": -1, "seed": 0, "min_tokens": 3, "ignore_eos": True}
    given |= {"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 1, "max_tokens": 7}
    params = translate(**given, stop="x", stop_token_ids=[5, 5], logit_bias={"12": 3}).params
    assert {name: getattr(params, name) for name in given} == given | {"top_k": 0}
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), frozenset({5}), {12: 3})
    assert translate().params == type(params)(max_tokens=16 if translate is of_completions else None)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (of_chat(thinking_budget=5, logprobs=True), "logprobs"),
        (of_responses(reasoning={"effort": "low"}, include=["message.output_text.logprobs"]), "include"),
        (of_chat(messages=[USER] * 10_000, tool_choice="required"), "tool_choice"),
        (of_responses(instructions="x", input=[USER] * 10_000), "input"),
    ],
)
def test_what_disagrees_is_named_as_the_client_named_it(request_: GenerationRequest, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_request(request_)
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_of_two_names_the_one_that_the_client_used_is_in_errors(field: str) -> None:
    assert of_chat(**{field: 3}).client_name("max_tokens") == field
