"""Where a request's time went, on request; and the debug log's line for every step."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    FakeClock,
    StepGate,
    ask,
    block_bytes,
    events,
    post,
    random_tokens,
    raw,
    run_on,
    start,
)
from tests.support import RunningServer, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = {"X-Mlxpaged-Timeline": "1"}
PHASES = ("queued_seconds", "prefill_seconds", "decode_seconds", "preempted_seconds")

clock = FakeClock()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One sequence at a time, 64 tokens a step, and every step takes a second."""
    config = EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1, max_num_batched_tokens=64)
    with running_server(config, clock=clock) as server:
        clock.tick(server)
        yield server
        server.wait_idle()


def timeline_of(response: httpx.Response) -> Any:
    """Whole or streamed: there it is in the last chunk."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()["timeline"]
    *chunks, last, done = events(iter(response.text.splitlines()))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert not any("timeline" in chunk for chunk in chunks)
    return last["timeline"]


def add_up(timeline: dict[str, Any]) -> bool:
    return bool(sum(timeline[phase] for phase in PHASES) == pytest.approx(timeline["total_seconds"]))


@pytest.mark.parametrize("stream", [True, False])
def test_a_timeline_tells_prompt_chunks_steps_and_phases(server: RunningServer, stream: bool) -> None:
    prompt = random_tokens(150, 10 + stream)
    with raw(server) as client:
        first = timeline_of(client.post(COMPLETIONS, json=run_on(prompt, 10, stream=stream), headers=HEADER))
        assert first == {
            "total_seconds": 12,
            "queued_seconds": 0,
            "prefill_seconds": 3,
            "decode_seconds": 9,
            "preempted_seconds": 0,
            "cached_tokens": 0,
            "prompt_chunks": [64, 64, 22],
            "recomputed_tokens": 0,
            "steps": 12,
            "preemptions": 0,
            "swaps_out": 0,
            "swaps_in": 0,
        }
        again = timeline_of(client.post(COMPLETIONS, json=run_on(prompt, 10, stream=stream), headers=HEADER))
    assert again == first | {
        "total_seconds": 10,
        "prefill_seconds": 1,
        "cached_tokens": 149,
        "prompt_chunks": [1],
        "steps": 10,
    }


@pytest.mark.parametrize("stream", [True, False])
def test_chat_has_timelines_too_and_the_wait_is_in_them(server: RunningServer, stream: bool) -> None:
    with StepGate(server) as gate:
        first = start(server, run_on(random_tokens(20, 1), 20), "first")
        gate.wait_held()
        body = ask("Who are you?", max_tokens=4, ignore_eos=True, stream=stream)
        second = start(server, body, "second", X_Mlxpaged_Timeline="1")
        clock.advance(7)
        gate.open()
        assert "timeline" not in first.result().json(), "it did not ask"
        timeline = timeline_of(second.result())
    assert (timeline["queued_seconds"], timeline["prefill_seconds"], timeline["decode_seconds"]) == (26 + 1, 1, 3)
    assert add_up(timeline)


@pytest.mark.parametrize(("stream", "swap_blocks"), [(True, 0), (False, 20)])
def test_a_preemption_is_a_phase_of_its_own(demo_server: RunningServer, stream: bool, swap_blocks: int) -> None:
    block = block_bytes(demo_server)
    config = EngineConfig(
        kv_cache_bytes=3 * block, swap_space_bytes=swap_blocks * block, prefix_caching=False, timelines=True
    )
    with running_server(config, clock=clock) as server:
        clock.tick(server)
        with StepGate(server) as gate:
            bodies = [run_on(random_tokens(30, seed), 60, stream=stream) for seed in (5, 6)]
            first = start(server, bodies[0], "first")
            second = start(server, bodies[1] | {"service_tier": "flex"}, "second")
            gate.open()
            undisturbed, preempted = timeline_of(first.result()), timeline_of(second.result())
        server.wait_idle()
    assert add_up(undisturbed)
    assert undisturbed["preemptions"] == undisturbed["preempted_seconds"] == undisturbed["recomputed_tokens"] == 0
    assert undisturbed["steps"] == 60
    assert add_up(preempted)
    assert preempted["preemptions"] == 1
    assert preempted["swaps_out"] == preempted["swaps_in"] == (swap_blocks > 0)
    assert preempted["preempted_seconds"] > 10
    assert (preempted["recomputed_tokens"] > 30) == (swap_blocks == 0)
    assert preempted["prompt_chunks"] == [30]
    assert preempted["steps"] == 60
    # A second per step that it was part of, and per step that it sat out with its blocks in hand, no other being free.
    assert preempted["prefill_seconds"] + preempted["decode_seconds"] >= 60


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_several_choices_have_a_timeline_each(server: RunningServer, path: str, stream: bool) -> None:
    body = ask("x", max_tokens=3) if path == CHAT else run_on("x", 3)
    with raw(server) as client:
        body |= {"n": 3, "stream": stream, "ignore_eos": True}
        timelines = timeline_of(client.post(path, json=body, headers=HEADER))
    assert [timeline["queued_seconds"] for timeline in timelines] == [0, 3, 6]
    assert all(add_up(timeline) for timeline in timelines)


def test_usage_and_timeline_share_the_last_chunk(server: RunningServer) -> None:
    body = ask("x", max_tokens=2, stream=True, stream_options={"include_usage": True})
    with raw(server) as client:
        *_, last, _ = events(iter(client.post(CHAT, json=body, headers=HEADER).text.splitlines()))
    assert last["usage"]["completion_tokens"] == 2
    assert last["timeline"]["steps"] == 2


def test_the_flag_is_for_all_and_the_header_for_one(server: RunningServer) -> None:
    with running_server(EngineConfig(kv_cache_bytes=8_000_000, timelines=True)) as talkative, raw(talkative) as client:
        assert client.post(COMPLETIONS, json=run_on("x", 2)).json()["timeline"]["steps"] == 2
        silenced = client.post(COMPLETIONS, json=run_on("x", 2), headers={"X-Mlxpaged-Timeline": "0"})
        assert "timeline" not in silenced.json()
    assert "timeline" not in post(server, run_on("x", 2))


@pytest.mark.parametrize("value", ["", "yes", "2", "true"])
def test_a_header_that_says_neither_is_refused(server: RunningServer, value: str) -> None:
    with raw(server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 2), headers={"X-Mlxpaged-Timeline": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Mlxpaged-Timeline"


def test_every_step_is_a_line_in_the_debug_log(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mlxpaged.core.engine.step_log"):
        post(server, run_on(random_tokens(100, 30), 3))
        server.wait_idle()
    lines = [r.getMessage() for r in caplog.records if r.name == "mlxpaged.core.engine.step_log"]
    steps = [dict(re.findall(r"(\w+)=([\d.]+)", line)) for line in lines if line.startswith("step ")]
    shown = [[int(step[name]) for name in ("rows", "decode_rows", "prompt_tokens", "tokens")] for step in steps]
    assert shown == [[1, 0, 64, 64], [1, 0, 36, 36], [1, 1, 0, 1], [1, 1, 0, 1]]
    assert [(step["running"], step["waiting"]) for step in steps] == [("1", "0")] * 3 + [("0", "0")]
    assert {float(step["seconds"]) for step in steps} == {1.0}
    total = server.core.scheduler.pool.num_blocks
    assert {sum(int(step[f"blocks_{state}"]) for state in ("used", "cached", "free")) for step in steps} == {total}
    assert [step["blocks_used"] for step in steps] == ["2", "4", "4", "0"]
