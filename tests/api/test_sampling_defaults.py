"""What a request does not set is what the model recommends, or the server's flags say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpaged.api.body import validate
from mlxpaged.api.openai.completions import translate
from mlxpaged.api.openai.schema import CompletionRequest
from mlxpaged.api.reading import Reading
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import post, random_tokens, raw
from tests.support import RunningServer, make_tiny_model, running_server

RECOMMENDED = {"temperature": 1.5, "top_k": 1, "top_p": 0.95, "repetition_penalty": 1.1}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL = dict(zip(NAMES, (1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0), strict=True))
END = 7


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that recommends the likeliest token, whatever the temperature is, and has two end tokens."""
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    content = RECOMMENDED | {"min_p": "much", "eos_token_id": [0, END]}
    (model / "generation_config.json").write_text(json.dumps(content))
    options: dict[str, Any] = {"default_top_p": 0.9, "default_frequency_penalty": 0.5}
    config = EngineConfig(str(model), "tiny", kv_cache_bytes=4_000_000, **options)
    with running_server(config) as server:
        yield server


def text(server: RunningServer, body: dict[str, Any]) -> str:
    return str(post(server, {"model": "tiny", "ignore_eos": True} | body)["choices"][0]["text"])


def test_a_model_shows_its_defaults(server: RunningServer) -> None:
    with raw(server) as client:
        shown = client.get("/v1/models/tiny").json()["sampling_defaults"]
    assert shown == NEUTRAL | RECOMMENDED | {"top_p": 0.9, "frequency_penalty": 0.5}


def test_a_request_that_sets_nothing_has_the_defaults(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": random_tokens(40, 3), "max_tokens": 40}
    defaults = text(server, body)
    assert all(text(server, body) == defaults for _ in range(2))
    assert text(server, body | dict.fromkeys(NAMES)) == defaults
    assert text(server, body | RECOMMENDED | {"frequency_penalty": 0.5}) == defaults
    assert text(server, body | NEUTRAL | {"top_k": 1}) != defaults, "no penalty"


def test_what_a_request_sets_wins(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": random_tokens(40, 3), "max_tokens": 40}
    free = body | {"top_k": 0, "top_p": 1}
    assert text(server, free) != text(server, free)
    seeded = body | NEUTRAL | {"seed": 1}
    assert text(server, seeded) == text(server, seeded) != text(server, body)


@pytest.mark.parametrize("name", ["repetition_penalty", "repeat_penalty"])
def test_a_penalty_of_zero_is_none_although_the_model_recommends_one(name: str) -> None:
    body = validate({"prompt": "x", name: 0}, CompletionRequest, Reading(CompletionRequest, strict=False))
    request = translate(body).with_defaults(EngineConfig().sampling_defaults(RECOMMENDED))
    assert (request.params.repetition_penalty, request.params.temperature) == (1.0, 1.5)


def test_a_temperature_of_zero_is_not_replaced_by_the_default(server: RunningServer) -> None:
    body: dict[str, Any] = {"prompt": random_tokens(40, 3), "max_tokens": 40, "top_k": 0}
    greedy = text(server, body | {"temperature": 0})
    assert greedy == text(server, body | {"top_k": 1})
    assert len({text(server, body) for _ in range(2)} - {greedy}) == 2


def test_every_api_has_the_defaults(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 24}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 24}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 24}),
    ]
    with raw(server) as client:
        chats, responses, answers = ([client.post(path, json=body).json() for _ in range(2)] for path, body in asked)
    texts = [chat["choices"][0]["message"]["content"] for chat in chats]
    texts += [response["output"][0]["content"][0]["text"] for response in responses]
    texts += [answer["content"][0]["text"] for answer in answers]
    assert len(set(texts)) == 1
    assert [(response["temperature"], response["top_p"]) for response in responses] == [(1.5, 0.9)] * 2


def test_the_end_tokens_of_the_file_end_an_answer(server: RunningServer) -> None:
    for end in (0, END):
        answer = post(server, {"model": "tiny", "prompt": "Once", "max_tokens": 9, "logit_bias": {str(end): 100}})
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)


def test_the_recommendation_can_be_turned_off() -> None:
    assert EngineConfig().sampling_defaults(RECOMMENDED) == NEUTRAL | RECOMMENDED
    assert EngineConfig(generation_config=False).sampling_defaults(RECOMMENDED) == NEUTRAL
    kept = EngineConfig(generation_config=False, default_top_k=-1, default_temperature=0.0)
    assert kept.sampling_defaults(RECOMMENDED) == NEUTRAL | {"temperature": 0.0}


@pytest.mark.parametrize(("name", "value"), [("temperature", 3.0), ("top_p", 0.0), ("top_k", -2), ("min_p", 1.5)])
def test_a_default_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"default_{name} must be a .*number"):
        EngineConfig(**{f"default_{name}": value})
