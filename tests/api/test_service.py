"""Models, health and metrics: what the server says about itself, before, while and after it can serve."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.self_check import BackendChoice
from mlxpaged.cli.banner import banner
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import ModelNotFoundError
from tests.api.helpers import DEADLINE, StepGate, ask, metrics, post, random_tokens, raw, raw_post, run_on
from tests.support import RunningServer, running_server, wait_until


def get(server: RunningServer, path: str) -> httpx.Response:
    with raw(server) as client:
        return client.get(path)


def test_the_loaded_model_is_listed_and_described(client: OpenAI, demo_server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    assert get(demo_server, "/v1/models/demo").json()["context_length"] == 4096


def test_the_client_of_anthropic_lists_the_models(demo_server: RunningServer) -> None:
    with Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        (model,) = client.models.list()
        assert client.models.retrieve("demo") == model
    created = get(demo_server, "/v1/models/demo").json()["created"]
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.timestamp() == created


@pytest.mark.parametrize("name", ["gpt-4", "a/b", "demo/", "%00", "%FF", "..%2fdemo"])
def test_another_model_is_not_found(demo_server: RunningServer, name: str) -> None:
    response = get(demo_server, f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


def test_health_says_ok_with_the_numbers_of_requests(demo_server: RunningServer) -> None:
    assert get(demo_server, "/health").status_code == 200
    assert get(demo_server, "/health").json() == {"status": "ok", "model": "demo", "running": 0, "waiting": 0}
    with StepGate(demo_server) as gate:
        gate.allow(2)
        with raw_post(demo_server, "/v1/completions", run_on("Once", 8)):
            wait_until(lambda: get(demo_server, "/health").json()["running"] == 1)
            gate.open()
            demo_server.wait_idle()


def test_the_models_name_in_the_api_can_be_chosen() -> None:
    with running_server(EngineConfig(kv_cache_bytes=8_000_000, served_model_name="my/name")) as server:
        assert [model["id"] for model in get(server, "/v1/models").json()["data"]] == ["my/name"]
        assert get(server, "/v1/models/my/name").json()["id"] == "my/name"
        assert post(server, ask("What is 17 + 25?") | {"model": "my/name"})["model"] == "my/name"
        with server.client() as client, pytest.raises(openai.NotFoundError, match="my/name"):
            client.completions.create(model="demo", prompt="x")


def test_embeddings_are_refused_by_name(demo_server: RunningServer) -> None:
    with (
        demo_server.client() as client,
        pytest.raises(
            openai.BadRequestError,
            match=r"'demo' cannot be used for embeddings, because its directory has no modules.json.*--embedding-model",
        ) as error,
    ):
        client.embeddings.create(model="demo", input="x")
    assert (error.value.param, error.value.code) == ("model", "embeddings_not_supported")


def test_http_is_up_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxpaged.engine import builder

    go_on = threading.Event()
    load_model = builder.load_model

    def slow_load(*names: Any) -> Any:
        report = names[2].report
        report(3_240_000_000, 8_100_000_000)
        assert go_on.wait(DEADLINE)
        return load_model(*names)

    monkeypatch.setattr(builder, "load_model", slow_load)
    with running_server(EngineConfig(kv_cache_bytes=8_000_000), wait_loaded=False) as server:
        try:
            wait_until(lambda: server.engine.progress is not None)
            health = get(server, "/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            assert health.json()["progress"] == get(server, "/v1/status").json()["progress"] == "loading 3.2 of 8.1 GB"
            [model] = get(server, "/v1/models").json()["data"]
            assert (model["id"], model["state"], model["memory_bytes"]) == ("demo", "loading", None)
            assert model["progress"] == "loading 3.2 of 8.1 GB"
            assert get(server, "/metrics").status_code == 200
            with raw(server) as client:
                for path, body in (("/v1/chat/completions", ask("x")), ("/v1/completions", run_on("x", 1))):
                    response = client.post(path, json=body)
                    assert response.status_code == 503
                    assert int(response.headers["retry-after"]) >= 1
                    assert response.json()["error"]["code"] == "loading"
                    assert "loading 3.2 of 8.1 GB" in response.json()["error"]["message"]
        finally:
            go_on.set()
        wait_until(lambda: get(server, "/health").status_code == 200, DEADLINE)
        assert "progress" not in get(server, "/health").json()
        assert post(server, ask("What is 17 + 25?"))["choices"][0]["message"]["content"] == "42"


def test_the_server_says_that_the_metal_kernels_are_off_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxpaged.engine import executor

    reason = "kv_gather, mixed chunks (4 heads): the results differ"
    choice = BackendChoice(resolve_backend("auto"), reason)
    monkeypatch.setattr(executor, "choose_backend", lambda *_: choice)
    with running_server(EngineConfig(kv_cache_bytes=8_000_000)) as server:
        health = get(server, "/health")
        assert (health.status_code, health.json()["metal_kernels_off"]) == (200, reason)
        attention = get(server, "/v1/status").json()["attention"]
        assert attention == {"backend": choice.backend, "metal_kernels_off": reason, "invariant_rows": None}
        assert f"the Metal kernels are off: {reason}\n" in banner(server.registry, server.url, False)


def test_a_server_can_be_stopped_while_its_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxpaged.engine import builder

    go_on = threading.Event()

    def stuck(*_: Any) -> Any:
        go_on.wait(DEADLINE)
        raise ModelNotFoundError("no request waits for it")

    monkeypatch.setattr(builder, "load_model", stuck)
    before = set(threading.enumerate())
    with running_server(EngineConfig(kv_cache_bytes=8_000_000), wait_loaded=False) as server:
        assert get(server, "/health").json()["status"] == "loading"
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)


def test_without_a_model_the_server_is_healthy_and_chat_is_not_available() -> None:
    with running_server(None) as server:
        assert get(server, "/health").json() == {"status": "ok", "model": None}
        assert get(server, "/v1/models").json() == {"object": "list", "data": []}
        assert get(server, "/v1/models/demo").status_code == 404
        assert get(server, "/metrics").status_code == 200
        with server.client() as client, pytest.raises(openai.InternalServerError) as error:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x"}])
        assert error.value.status_code == 503
        assert error.value.code == "no_model"


def test_metrics_agree_with_the_engines_own_numbers(client: OpenAI, demo_server: RunningServer) -> None:
    prompt = random_tokens(100, 501)
    before = metrics(demo_server)
    for _ in range(2):
        client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=10, extra_body={"ignore_eos": True}
        )
    demo_server.wait_idle()
    after, stats = metrics(demo_server), demo_server.engine.stats
    assert stats is not None
    scheduler = stats.scheduler
    assert {name: after[f"mlxpaged_{name}"] for name in ("requests_running", "requests_waiting")} == {
        "requests_running": scheduler.running,
        "requests_waiting": scheduler.waiting,
    }
    assert [after[f"mlxpaged_kv_blocks|{state}"] for state in ("used", "cached", "free")] == [
        scheduler.blocks.used,
        scheduler.blocks.cached,
        scheduler.blocks.free,
    ]
    assert {
        "prefix_hit_tokens": scheduler.prefix_hit_tokens_total,
        "prompt_tokens": scheduler.prompt_tokens_total,
        "generated_tokens": stats.generated_tokens_total,
        "preemptions": scheduler.preemptions_total,
        "engine_steps": stats.steps_total,
        "model_calls": stats.model_calls_total,
        "attention_calls": stats.attention_calls_total,
    }.items() <= {name.removeprefix("mlxpaged_").removesuffix("_total"): value for name, value in after.items()}.items()

    def moved(name: str) -> float:
        return after[f"mlxpaged_{name}"] - before.get(f"mlxpaged_{name}", 0)

    assert moved("generated_tokens_total") == 20
    assert moved("prompt_tokens_total") == 200
    assert moved("prefix_hit_tokens_total") == 96
    assert moved("requests_finished_total|length") == 2
    assert moved("time_to_first_token_seconds_count") == 2
    assert moved("inter_token_latency_seconds_count") == 18
    assert moved("e2e_request_latency_seconds_count") == 2
    assert after["mlxpaged_e2e_request_latency_seconds_sum"] >= after["mlxpaged_time_to_first_token_seconds_sum"]


def test_a_model_that_cannot_be_loaded_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with running_server(EngineConfig(model="/does/not/exist"), wait_loaded=False) as server:
        wait_until(lambda: server.engine.state is EngineState.DEAD)
        health = get(server, "/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert "/does/not/exist" in health.json()["reason"]
        [model] = get(server, "/v1/models").json()["data"]
        assert (model["state"], "/does/not/exist" in model["error"]) == ("failed", True)
        with raw(server) as client:
            response = client.post("/v1/chat/completions", json=ask("x"))
        assert response.status_code == 503
        assert "/does/not/exist" in response.json()["error"]["message"]
