"""A step or a load that does not end: the server says so, ends what waits, and goes on if it ends after all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.api.batches import runner
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.engine import builder
from mlxpaged.engine.engine_thread import EngineThread
from mlxpaged.engine.watchdog import LOAD_SECONDS, StallLimits
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import registry_of
from tests.api.helpers import (
    DEADLINE,
    Background,
    FakeClock,
    StepGate,
    check_failure,
    random_tokens,
    raw,
    run_on,
    start,
)
from tests.api.test_batches import ended, jsonl, submit
from tests.support import (
    RunningServer,
    make_embedding_model,
    make_tiny_model,
    running_server,
    wait_until,
    with_embeddings,
)

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
LIMIT = 60.0

clock = FakeClock()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One sequence at a time, embeddings, and a model that is loaded on first use, on a clock that only tests move."""
    base = EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1)
    root = tmp_path_factory.mktemp("models")
    small, vectors = make_tiny_model(root / "small", "qwen3"), make_embedding_model(root / "vectors")
    models = [
        Model("demo", base),
        Model("vectors", EngineConfig(str(vectors), "vectors", kv_cache_bytes=2_000_000, only_embeds=True)),
        Model("small", EngineConfig(str(small), "small", kv_cache_bytes=2_000_000)),
    ]
    limits = StallLimits(step_timeout=LIMIT)
    registry = registry_of(models, base, num_at_start=2, clock=clock, watchdog=limits)
    with running_server(registry, clock=clock, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def health(server: RunningServer) -> tuple[int, dict[str, Any]]:
    with raw(server) as client:
        response = client.get("/health")
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    return response.status_code, response.json()


def unfinished(server: RunningServer) -> int:
    return sum(engine.num_unfinished for engine in server.registry.engines)


def stall(server: RunningServer) -> None:
    """Let the running step take too long."""
    clock.advance(LIMIT + 1)
    wait_until(lambda: server.registry.stall is not None)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stall_is_told_ends_what_waits_and_is_over_when_the_step_ends(
    server: RunningServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.engine.stats.generated_tokens_total
    with StepGate(server) as gate:
        running = start(server, run_on(random_tokens(10, 1), 20, stream=stream), "first")
        gate.allow(3)
        waiting = start(server, run_on(random_tokens(50, 2), 20, stream=stream), "late")
        embedding = Background.post(server, EMBEDDINGS, {"model": "vectors", "input": "x"})
        wait_until(lambda: unfinished(server) == 3)
        gate.wait_held()
        assert health(server)[0] == 200
        with caplog.at_level(logging.CRITICAL):
            stall(server)
            error = check_failure(waiting, 503, "server_error", "stalled")
        assert check_failure(embedding, 503, "server_error", "stalled")
        status, body = health(server)
        assert (status, body["status"]) == (503, "stalled")
        size = {"model": "demo", "work": "step", "rows": 1, "tokens": 1, "seconds": 61.0, "limit_seconds": 60.0}
        assert body["stall"] == size
        assert body["reason"] == error["message"]
        assert "a step of 'demo' with 1 rows and 1 tokens has not ended within 60 s" in error["message"]
        parts = error["message"], "(most recent call first)", "engine_thread.py"
        wait_until(lambda: all(part in caplog.text for part in parts))  # it is written after the clients are told
        with raw(server) as client:
            refused = client.post(COMPLETIONS, json=run_on("x", 2))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
            shown = client.get("/v1/status").json()
            assert (shown["state"], [model["id"] for model in shown["models"]]) == ("stalled", ["demo", "vectors"])
        gate.open()
        assert running.result().status_code == 200
    wait_until(lambda: health(server)[0] == 200)
    server.wait_idle()
    assert server.engine.stats.scheduler.waiting == 0
    assert server.engine.stats.generated_tokens_total == before + 20, "the request that waited was not computed"
    with raw(server) as client:
        assert client.post(COMPLETIONS, json=run_on("x", 2)).status_code == 200


def test_a_stall_is_found_although_the_event_loop_is_blocked(server: RunningServer) -> None:
    entered, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        entered.set()
        go_on.wait(DEADLINE)

    with StepGate(server) as gate:
        pending = start(server, run_on("x", 5), "it")
        gate.wait_held()
        server.run(block())
        assert entered.wait(DEADLINE)
        stall(server)
        go_on.set()
        wait_until(lambda: health(server)[0] == 503)
        gate.open()
        assert pending.result().status_code == 200
    server.wait_idle()


def test_a_step_that_is_not_late_and_an_idle_engine_are_no_stall(server: RunningServer) -> None:
    with StepGate(server) as gate:
        pending = start(server, run_on("x", 3), "it")
        for _ in range(3):
            gate.wait_held()
            clock.advance(LIMIT - 1)
            time.sleep(0.3)  # longer than the watchdog's pause
            assert server.registry.stall is None
            gate.allow(1)
        assert pending.result().status_code == 200
    server.wait_idle()
    host = server.registry.host
    assert isinstance(host, EngineThread)
    wait_until(lambda: host.activity is None)
    clock.advance(10 * LIMIT)
    time.sleep(0.3)
    assert health(server)[0] == 200


def test_a_load_that_does_not_go_on_ends_the_requests_that_wait_for_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, load_model = threading.Event(), builder.load_model

    def stuck(*args: Any) -> Any:
        args[2].report(1, 2)
        assert go_on.wait(DEADLINE)
        return load_model(*args)

    monkeypatch.setattr(builder, "load_model", stuck)
    body = run_on("x", 2) | {"model": "small"}
    plain = Background.post(server, COMPLETIONS, body)
    stream = Background.post(server, COMPLETIONS, body | {"stream": True})
    model = server.registry.models["small"]
    wait_until(lambda: model.num_waiting >= 2 and model.engine is not None and model.engine.progress is not None)
    clock.advance(LIMIT + 1)
    time.sleep(0.3)
    assert server.registry.stall is None, "a load has another limit than a step"
    clock.advance(LOAD_SECONDS)
    error = check_failure(plain, 503, "server_error", "stalled")
    assert "a load of 'small' has not ended within" in error["message"]
    check_failure(stream, 503, "server_error", "stalled")
    assert health(server)[1]["stall"]["work"] == "load"
    go_on.set()
    wait_until(lambda: health(server)[0] == 200)
    with raw(server) as client:
        assert client.post(COMPLETIONS, json=body).status_code == 200
    assert server.engine.state is EngineState.READY


def test_embeddings_expire_by_the_servers_clock(server: RunningServer) -> None:
    """The event loop's timers go on while a Mac sleeps."""
    with StepGate(server) as gate:
        pending = start(server, run_on("x", 2), "it")
        gate.wait_held()
        embedding = Background.post(server, EMBEDDINGS, {"model": "vectors", "input": "x", "timeout": 0.2})
        wait_until(lambda: unfinished(server) == 2)
        time.sleep(0.5)
        assert embedding.thread.is_alive()
        clock.advance(1)
        check_failure(embedding, 408, "timeout_error", "deadline_exceeded")
        gate.open()
        assert pending.result().status_code == 200
    server.wait_idle()


def test_a_batch_goes_on_after_a_stall(server: RunningServer) -> None:
    with StepGate(server) as gate, server.client() as client:
        batch = submit(client, jsonl([run_on("x", 3), run_on("y", 3)]))
        gate.wait_held()
        stall(server)
        time.sleep(3 * runner.POLL_SECONDS)
        gate.open()
        done = ended(client, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.completed == 2
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_shutdown_does_not_wait_for_a_step_that_does_not_end(stream: bool) -> None:
    with running_server(EngineConfig(kv_cache_bytes=2_000_000)) as server, StepGate(server) as gate:
        running = start(server, run_on("x", 20, stream=stream), "running")
        gate.wait_held()
        assert not server.run(server.registry.drain(0)).result(DEADLINE)
        error = check_failure(running, 503, "server_error", "draining")
        assert error["message"] == "the server is shutting down"
        gate.open()


def test_what_a_step_answers_after_a_shutdown_has_ended_its_request_is_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = with_embeddings(EngineConfig(kv_cache_bytes=2_000_000), make_embedding_model(tmp_path / "vectors"))
    with running_server(registry) as server:
        with StepGate(server) as gate:
            start(server, run_on("x", 20), "running")
            gate.wait_held()
            embedding = Background.post(server, EMBEDDINGS, {"model": "vectors", "input": "x"})
            wait_until(lambda: registry.num_unfinished == 2)
            assert not server.run(registry.drain(0)).result(DEADLINE)
            assert check_failure(embedding, 503, "server_error", "draining")["message"] == "the server is shutting down"
            gate.open()
        server.run(registry.engines[1].clear_cache()).result(DEADLINE)
    assert "Exception in callback" not in caplog.text


def test_a_shutdown_without_time_for_requests_does_not_say_that_some_run(caplog: pytest.LogCaptureFixture) -> None:
    with running_server(EngineConfig(kv_cache_bytes=2_000_000)) as server:
        assert server.run(server.registry.drain(0)).result(DEADLINE)
    assert "still running" not in caplog.text
