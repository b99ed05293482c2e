"""--max-model-len: each API refuses a longer request in its own format, and the server says what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import metrics, raw
from tests.support import RunningServer, running_server

LONG = "word " * 200
MESSAGES = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        EngineConfig(served_model_name="local", kv_cache_bytes=64_000_000, max_model_len=100)
    ) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ],
)
def test_a_longer_request_is_refused_with_the_limit(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    with raw(server) as client:
        answer = client.post(path, json={"model": "local", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        assert error["message"].endswith("tokens > 100 maximum")
    else:
        assert error["code"] == "context_length_exceeded"
        assert "this server's limit is 100 tokens (--max-model-len)" in error["message"]


def test_an_answer_ends_at_the_limit_of_the_server(server: RunningServer) -> None:
    with raw(server) as client:
        body = {"model": "local", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}
        answers = [client.post("/v1/completions", json=body | {"max_tokens": limit}).json() for limit in (97, 10**6)]
        model = client.get("/v1/models/local").json()
    assert [answer["usage"]["total_tokens"] for answer in answers] == [100, 100]
    assert model["max_model_len"] == 100
    assert model["context_length"] > 100


def test_the_status_and_the_metrics_tell_the_present_and_the_greatest_size_of_the_pool(server: RunningServer) -> None:
    with raw(server) as client:
        status = client.get("/v1/status").json()
    blocks, kv_cache = status["blocks"], status["kv_cache"]
    assert 0 < blocks["total"] < blocks["max_total"]
    assert 0 < kv_cache["bytes"] < kv_cache["max_bytes"] <= 64_000_000
    assert kv_cache["bytes"] * blocks["max_total"] == kv_cache["max_bytes"] * blocks["total"]
    counted = metrics(server)
    assert counted["mlxpaged_max_kv_blocks"] == blocks["max_total"]
    assert counted["mlxpaged_kv_cache_bytes"] == kv_cache["bytes"]
