"""What mlx-lm's own tests expect of its server holds here too: its requests, with this model's name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.helpers import post, raw, stream_events
from tests.support import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SYSTEM, HELLO = "You are a helpful assistant.", "Hello!"
SAMPLED: dict[str, Any] = {"max_tokens": 10, "temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2}
GREEDY: dict[str, Any] = {"max_tokens": 10, "temperature": 0.0}


def conversation(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def test_a_completion_with_a_seed_repeats(demo_server: RunningServer) -> None:
    body = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": 10,
        "temperature": 0.5,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "repetition_context_size": 20,
        "seed": 999,
        "stop": "stop sequence",
    }
    first, second = post(demo_server, body), post(demo_server, body)
    assert first["id"]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


@pytest.mark.parametrize(
    "messages",
    [
        conversation(HELLO),
        [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": [{"type": "text", "text": HELLO}]},
        ],
    ],
    ids=["texts", "parts"],
)
def test_a_chat_is_answered(demo_server: RunningServer, messages: list[dict[str, Any]]) -> None:
    answer = post(demo_server, SAMPLED | {"model": "demo", "messages": messages})
    assert answer["id"]
    assert len(answer["choices"]) == 1


def test_the_models_are_listed(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        response = client.get("/v1/models")
    assert response.status_code == 200
    assert response.json()["object"] == "list"
    model = response.json()["data"][0]
    assert model["object"] == "model"
    assert {"id", "created"} <= set(model)


@pytest.mark.parametrize("given", [{"prompt": "Once upon a time"}, {"messages": conversation(HELLO)}])
def test_a_draft_model_changes_no_answer(demo_server: RunningServer, given: dict[str, Any]) -> None:
    """The drafts are ignored: they would only make the answer faster."""
    body = GREEDY | given | {"model": "demo"}
    plain = post(demo_server, body)
    assert plain["usage"]["completion_tokens"] > 0
    assert post(demo_server, body | {"draft_model": "d", "num_draft_tokens": 3})["choices"] == plain["choices"]


def test_every_chunk_of_a_stream_has_one_choice_with_a_delta(demo_server: RunningServer) -> None:
    *chunks, done = stream_events(demo_server, CHAT, GREEDY | {"model": "demo", "messages": conversation(HELLO)})
    assert done == "[DONE]"
    assert chunks
    assert all(len(chunk["choices"]) == 1 and "delta" in chunk["choices"][0] for chunk in chunks)


def test_two_chats_with_one_beginning_are_both_answered(demo_server: RunningServer) -> None:
    for question in ("Tell me a story about", "Tell me a story about dragons."):
        body = {"model": "demo", "max_tokens": 5, "temperature": 0.0, "messages": conversation(question)}
        assert post(demo_server, body)["choices"][0]["message"]["content"] is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_context_size", 20),
        ("presence_context_size", 20),
        ("frequency_context_size", 20),
        ("xtc_probability", 0.0),
        ("xtc_threshold", 0.1),
        ("logit_bias", None),
        ("num_draft_tokens", 3),
        ("adapters", None),
        ("role_mapping", None),
        ("seed", None),
        ("stop", []),
        ("tools", []),
    ],
)
def test_the_defaults_of_its_fields_change_nothing(demo_server: RunningServer, field: str, value: Any) -> None:
    body = {"model": "demo", "messages": conversation("What is 17 + 25?"), "max_tokens": 4, "temperature": 0.0}
    assert post(demo_server, body | {field: value})["choices"][0]["message"]["content"] == "42"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "yes"),
        ("max_tokens", 0.5),
        ("temperature", -1),
        ("top_p", 2),
        ("min_p", -0.5),
        ("top_k", -5),
        ("repetition_penalty", -1),
        ("logit_bias", 3),
        ("logprobs", 3),
        ("seed", "x"),
        ("model", 3),
    ],
)
def test_values_of_the_wrong_type_or_range_are_refused(demo_server: RunningServer, field: str, value: Any) -> None:
    with raw(demo_server) as client:
        response = client.post(CHAT, json={"model": "demo", "messages": conversation(HELLO)} | {field: value})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


def test_what_is_no_json_object_is_refused_and_an_unknown_path_is_not_found(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        assert client.post(CHAT, content=b"{").status_code == 400
        assert client.post(CHAT, json=[]).status_code == 400
        assert client.post("/v1/nothing", json={}).status_code == 404
        assert client.post(CHAT, json={"model": "demo"}).status_code == 400
        assert client.post(COMPLETIONS, json={"model": "demo"}).status_code == 400
