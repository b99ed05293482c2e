"""GET /v1/status/stream: what a watcher sees, how often, and that it costs nothing without a watcher."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.phase_tracker import MAX_ENDED, PhaseTracker
from mlxpaged.api.recent_latencies import RecentLatencies
from mlxpaged.api.server import Server
from mlxpaged.api.status_stream import MAX_CELLS, ModelWatch, StatusStream, block_map
from mlxpaged.core.engine.status import SequenceState
from mlxpaged.core.engine.timeline import Phase
from mlxpaged.core.scheduling.sequence import Priority, SequenceStatus
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.registry import Registry
from tests.api.helpers import (
    DEADLINE,
    StepGate,
    bearer,
    metrics,
    queued_commands,
    random_tokens,
    raw,
    run_on,
    start,
    write_keys,
)
from tests.support import RunningServer, running_server, wait_until

STREAM = "/v1/status/stream"


@pytest.fixture
def server(demo_server: RunningServer) -> Iterator[RunningServer]:
    """Idle, and without a watcher."""
    yield demo_server
    demo_server.wait_idle()
    wait_until(lambda: task_of(demo_server) is None)


@contextlib.contextmanager
def watching(server: RunningServer) -> Iterator[Iterator[dict[str, Any]]]:
    with raw(server) as client, client.stream("GET", STREAM) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line)


@contextlib.contextmanager
def steps_for_replies(server: RunningServer) -> Iterator[StepGate]:
    """There is a step only when the engine is asked something, because it replies between two steps."""
    over = threading.Event()

    def let_through() -> None:
        while not over.wait(0.005):
            if gate.is_held and queued_commands(server):
                gate.allow(1)

    with StepGate(server) as gate:
        thread = threading.Thread(target=let_through)
        thread.start()
        try:
            yield gate
        finally:
            over.set()
            thread.join()


def task_of(server: RunningServer) -> Any:
    stream: StatusStream = server.app.state.status_stream
    return stream.task


def cells(model: dict[str, Any]) -> bytes:
    return base64.b64decode(model["map"]["cells"])


def test_a_watcher_sees_requests_their_blocks_and_which_of_them_are_shared(server: RunningServer) -> None:
    prefix = random_tokens(320, 77)
    with steps_for_replies(server), raw(server) as client, watching(server) as events:
        pending = [start(server, run_on([*prefix, 20 + i], 2000), f"watched-{i}") for i in range(2)]
        for event in events:
            [model] = event["models"]
            if model["running"] == 2 and all(each["phase"] == "decode" for each in model["requests"]):
                break
        assert len(client.delete("/v1/requests").json()["data"]) == 2
    assert [request.result().status_code for request in pending] == [499, 499]
    assert (model["id"], model["state"], model["waiting"]) == ("demo", "loaded", 0)
    assert {request["request_id"] for request in model["requests"]} == {"watched-0", "watched-1"}
    for request in model["requests"]:
        assert (request["shared_blocks"], request["status"]) == (10, "running")
        assert sum(seconds for _, seconds in request["segments"]) == pytest.approx(request["age_seconds"], abs=0.02)
    states, blocks = cells(model), model["blocks"]
    assert len(states) == blocks["total"]
    assert [states.count(state) for state in (0, 1, 3)] == [blocks["free"], blocks["cached"], 10]
    assert states.count(2) == blocks["used"] - 10 == sum(request["blocks"] - 10 for request in model["requests"])
    assert model["prompt_tokens"] >= 642
    assert event["rates"]["window_seconds"] == 30


def test_rates_and_requests_that_ended_follow_the_load(server: RunningServer) -> None:
    with steps_for_replies(server) as gate, watching(server) as events:
        next(events)
        answer = start(server, run_on("x", 200), "ends")
        seen = []
        for event in events:
            seen.append(event)
            if [request["phase"] for request in event["models"][0]["requests"]] == ["decode"]:
                gate.open()
            if "ends" in [request["request_id"] for request in event["models"][0]["ended"]]:
                break
    assert answer.result().status_code == 200
    assert max(event["rates"]["tokens_per_second"] for event in seen) > 0
    assert all(0 < value < 60 for name in ("ttft_seconds", "itl_seconds") for value in seen[-1]["rates"][name])
    [ended] = [each for each in seen[-1]["models"][0]["ended"] if each["request_id"] == "ends"]
    assert ended["segments"][-1][0] == "decode"


def test_watchers_share_one_snapshot_twice_a_second_and_the_last_one_ends_it(server: RunningServer) -> None:
    assert task_of(server) is None
    with watching(server) as one, watching(server) as other:
        times, others, started = [], [], time.monotonic()
        while len(set(times) & set(others)) < 3:  # who is slow misses some
            times.append(next(one)["time"])
            others.append(next(other)["time"])
        assert time.monotonic() - started > 0.9
    assert min(np.diff(times)) > 0.45
    wait_until(lambda: task_of(server) is None)


def test_refusals_are_shown_without_what_the_client_wrote(server: RunningServer) -> None:
    with raw(server) as client:
        assert client.post("/v1/completions", json={"prompt": "secret", "model": "no such"}).status_code == 404
    with watching(server) as events:
        refusal = next(events)["refusals"][0]
    assert refusal.pop("time") == pytest.approx(time.time(), abs=60)
    assert refusal.pop("request_id")
    assert refusal == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 404,
        "param": "model",
        "code": "model_not_found",
        "reason": "... does not exist; this server has ...",
    }
    assert metrics(server)["mlxpaged_requests_refused_total|model_not_found"] >= 1
    with raw(server) as client:
        client.delete("/v1/requests/sk-secret-0123456789")
    with watching(server) as events:
        assert next(events)["refusals"][0]["path"] == "/v1/requests/sk-***"


def test_a_request_for_the_head_of_the_stream_watches_nothing(server: RunningServer) -> None:
    with raw(server) as client:
        head = client.head("/v1/status/stream")
        assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert client.get("/health").status_code == 200  # on the same connection
    assert task_of(server) is None


def test_a_server_without_a_model_has_a_stream_without_models() -> None:
    async def first() -> dict[str, Any]:
        events = StatusStream(Server(None, time.monotonic, HttpConfig())).events()
        text = await events.__anext__()
        await events.aclose()
        found: dict[str, Any] = json.loads(text.removeprefix("data: "))
        return found

    event = asyncio.run(first())
    assert (event["models"], event["refusals"], event["rates"]["tokens_per_second"]) == ([], [], 0)


def test_the_stream_has_the_usage_of_keys_as_the_status_has(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", root={"admin": True})
    config, http = EngineConfig(kv_cache_bytes=16_000_000), HttpConfig(api_keys=tmp_path / "keys.json")
    with running_server(config, http=http, data_dir=tmp_path) as server:
        with raw(server) as client, client.stream("GET", STREAM, headers=bearer(keys["root"])) as response:
            first = next(json.loads(line[6:]) for line in response.iter_lines() if line)
        wait_until(lambda: task_of(server) is None)
    assert [each["name"] for each in first["keys"]] == ["root"]
    assert first["keys"][0].keys() >= {"requests", "prompt_tokens", "cached_tokens", "output_tokens", "month_tokens"}


def test_a_stream_ends_when_the_server_has_drained() -> None:
    """Otherwise the shutdown would wait for it."""

    async def watch() -> list[str]:
        registry = Registry.of(EngineConfig())
        events = StatusStream(Server(registry, time.monotonic, HttpConfig())).events()
        await events.__anext__()
        await registry.drain(1)
        return [text async for text in events]

    rest = asyncio.run(asyncio.wait_for(watch(), DEADLINE))
    assert len(rest) <= 1


def test_a_model_that_was_loaded_again_has_no_negative_rate(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw(server) as client:
        client.post("/v1/completions", json=run_on("x", 3))
    server.wait_idle()
    watch = ModelWatch(server.registry.default)
    server.run(watch.snapshot()).result(DEADLINE)
    stats = server.engine.stats
    assert stats is not None
    monkeypatch.setattr(server.engine, "stats", replace(stats, generated_tokens_total=0))
    assert (server.run(watch.snapshot()).result(DEADLINE)["tokens_per_second"] or 0) >= 0


def test_a_map_of_many_blocks_has_several_in_a_cell() -> None:
    states = bytearray(3 * MAX_CELLS - 1)
    states[5], states[-1] = 4, 7
    found = block_map(bytes(states))
    seen = base64.b64decode(found["cells"])
    assert (found["blocks_per_cell"], len(seen)) == (3, MAX_CELLS)
    assert (seen[1], seen[-1], sum(seen)) == (4, 7, 11)
    assert block_map(b"\x01" * MAX_CELLS)["blocks_per_cell"] == 1


def test_quantiles_are_those_of_the_last_half_minute() -> None:
    latencies = RecentLatencies()
    latencies.inter_token.extend((float(second), 1.0 if second < 50 else 0.01) for second in range(100))
    assert latencies.quantiles(99.0)["itl_seconds"] == pytest.approx([0.01, 0.01])
    assert latencies.quantiles(75.0)["itl_seconds"] == pytest.approx([0.01, 1.0])
    assert latencies.quantiles(99.0)["ttft_seconds"] is None
    assert latencies.quantiles(1000.0)["itl_seconds"] is None


STATE = SequenceState(
    request_id="a",
    status=SequenceStatus.WAITING,
    phase=None,
    priority=Priority.NORMAL,
    effective_priority=1.0,
    age_seconds=0.2,
    prompt_tokens=10,
    cached_tokens=0,
    output_tokens=0,
    computed_tokens=0,
    blocks=0,
    shared_blocks=0,
    max_ref_count=0,
    preemptions=0,
)


def test_the_segments_of_a_request_are_its_phases_in_order() -> None:
    tracker = PhaseTracker()
    running = SequenceStatus.RUNNING
    states = [
        STATE,
        replace(STATE, age_seconds=0.7),
        replace(STATE, age_seconds=1.2, status=running, phase=Phase.PREFILL),
        replace(STATE, age_seconds=1.7, status=running, phase=Phase.DECODE),
        replace(STATE, age_seconds=2.7, status=SequenceStatus.SWAPPED),
        replace(STATE, age_seconds=3.2, status=running, phase=Phase.DECODE),
    ]
    for state in states:
        tracker.update([state], all_listed=True)
    expected = [["queued", 0.7], ["prefill", 0.5], ["decode", 0.5], ["preempted", 1.0], ["decode", 0.5]]
    assert tracker.segments("a") == [[phase, pytest.approx(seconds)] for phase, seconds in expected]
    tracker.update([], all_listed=True)
    assert [track.last.request_id for track in tracker.ended] == ["a"]


def test_what_happened_before_the_first_snapshot_is_not_known() -> None:
    tracker = PhaseTracker()
    tracker.update([replace(STATE, age_seconds=60.0)], all_listed=True)
    tracker.update([replace(STATE, age_seconds=61.0), replace(STATE, request_id="b", age_seconds=2.0)], all_listed=True)
    assert tracker.segments("a") == [["unseen", 60.0], ["queued", 1.0]]
    assert tracker.segments("b") == [["queued", 2.0]]


def test_a_request_that_is_not_listed_may_still_wait() -> None:
    tracker = PhaseTracker()
    tracker.update([STATE], all_listed=True)
    tracker.update([], all_listed=False)
    assert not tracker.ended
    tracker.update([], all_listed=True)
    assert [track.last.request_id for track in tracker.ended] == ["a"]


def test_only_the_last_requests_that_ended_are_kept() -> None:
    tracker = PhaseTracker()
    for number in range(MAX_ENDED + 5):
        tracker.update([replace(STATE, request_id=f"{number}")], all_listed=True)
    tracker.update([], all_listed=True)
    assert len(tracker.ended) == MAX_ENDED
    assert tracker.ended[0].last.request_id == f"{MAX_ENDED + 4}"
