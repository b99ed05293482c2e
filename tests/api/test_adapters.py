"""Adapters over HTTP: their names, the field of mlx-lm's server, and answers beside those of their model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.cli.banner import banner
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import answer_text, ask, post, raw, run_on, side_by_side, stream_events, text_of
from tests.support import RunningServer, make_adapter, running_server, wait_until

NAMES = ["demo", "demo:pirate", "demo:poet"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("adapters")
    adapters = tuple(
        AdapterPath(name, make_adapter(DEMO_PATH, directory / name, seed))
        for seed, name in enumerate(("pirate", "poet"))
    )
    config = EngineConfig(kv_cache_bytes=64_000_000, adapters=adapters)
    registry = registry_of([Model("demo", config)], config, aliases={"small": "demo"})
    with running_server(registry) as server:
        yield server


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with raw(server) as client:
        yield client


def test_models_are_listed_with_their_adapters(http: httpx.Client) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == NAMES
    assert [model.get("parent") for model in models] == [None, "demo", "demo"]
    assert [model["capabilities"]["chat"] for model in models] == [True] * 3
    assert http.get("/v1/models/demo:poet").json() == models[2]


def test_the_name_of_a_model_or_the_field_chooses_the_adapter(server: RunningServer) -> None:
    def named(model: str, **fields: Any) -> tuple[str, str]:
        answer = post(server, run_on("Once upon a time", 16, model=model, **fields))
        return answer["model"], answer["choices"][0]["text"]

    answers = [named(name) for name in NAMES]
    assert [model for model, _ in answers] == NAMES
    assert len({text for _, text in answers}) == 3
    assert named("demo", adapters="pirate") == answers[1]
    assert named("demo", lora_path="pirate") == answers[1]
    assert named("demo:poet", adapters="poet") == answers[2]
    assert named("demo", adapters="") == answers[0]
    assert named("small:pirate") == answers[1]


def test_requests_of_a_model_and_its_adapters_run_together(server: RunningServer) -> None:
    bodies = [ask("What is 17 + 25?", model=name, max_tokens=12) for name in NAMES]
    alone = [answer_text(server, body) for body in bodies]
    model, pirate = side_by_side(lambda: answer_text(server, bodies[0]), lambda: answer_text(server, bodies[1]))
    assert [model, pirate] == alone[:2]
    assert alone[0] == "42"


def test_every_api_answers_with_an_adapter(server: RunningServer, http: httpx.Client) -> None:
    body = ask("Hello", model="demo:pirate", max_tokens=8)
    expected = answer_text(server, body)
    chunks = stream_events(server, "/v1/chat/completions", body)
    assert text_of(chunks) == expected
    assert {chunk["model"] for chunk in chunks[:-1]} == {"demo:pirate"}
    message = http.post("/v1/messages", json=body).json()
    assert (message["model"], message["content"][0]["text"]) == ("demo:pirate", expected)
    fields = {"model": "demo:pirate", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
    response = http.post("/v1/responses", json=fields).json()
    assert (response["model"], response["output"][0]["content"][0]["text"]) == ("demo:pirate", expected)
    options = {"options": {"num_predict": 8, "temperature": 0}, "stream": False}
    chat = http.post("/api/chat", json={"model": "demo:pirate", "messages": body["messages"]} | options).json()
    assert (chat["model"], chat["message"]["content"]) == ("demo:pirate", expected)
    assert http.post("/tokenize", json={"model": "demo:pirate", "prompt": "Hello"}).status_code == 200


def test_ollamas_lists_have_adapters(http: httpx.Client) -> None:
    tags = {model["name"]: model for model in http.get("/api/tags").json()["models"]}
    assert set(tags) == {"demo:latest", "demo:pirate", "demo:poet"}
    assert tags["demo:poet"]["details"]["parent_model"] == "demo"
    shown = http.post("/api/show", json={"model": "demo:poet"}).json()
    assert "completion" in shown["capabilities"]


def test_unknown_adapters_are_refused_with_the_known_ones(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json=ask("Hello", model="demo:sailor"))
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert all(repr(name) in error["message"] for name in NAMES)
    for path in ("/home/me/adapters", "demo:poet", "sailor"):
        response = http.post("/v1/chat/completions", json=ask("Hello", adapters=path))
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("adapters", "adapter_not_found")
        assert "'pirate', 'poet'" in error["message"]
    response = http.post("/v1/chat/completions", json=ask("Hello", model="demo:poet", adapters="pirate"))
    assert response.status_code == 400
    assert "differs" in response.json()["error"]["message"]


def test_an_adapter_makes_no_embeddings(http: httpx.Client) -> None:
    response = http.post("/v1/embeddings", json={"model": "demo:poet", "input": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "embeddings_not_supported"


def test_the_banner_names_the_adapters(server: RunningServer) -> None:
    assert "demo:pirate, demo:poet" in banner(server.registry, server.url, needs_key=False)


def test_a_bad_adapter_ends_the_start_with_one_message(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_bytes=16_000_000, adapters=(AdapterPath("poet", tmp_path),))
    with running_server(config, wait_loaded=False) as server, raw(server) as http:
        wait_until(lambda: "reason" in http.get("/health").json())
        health = http.get("/health")
        assert health.status_code == 503
        assert "the adapter 'poet' cannot be loaded" in health.json()["reason"]
