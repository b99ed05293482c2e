"""Requests that take too long, or would: they end with a 408 in any state and release all that they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    Background,
    FakeClock,
    StepGate,
    answer_text,
    ask,
    block_bytes,
    check_failure,
    metrics,
    random_tokens,
    raw,
    run_on,
    run_until_preempted,
    start,
)
from tests.support import RunningServer, running_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

clock = FakeClock()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One sequence at a time, on a clock that only tests move."""
    with running_server(EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1), clock=clock) as server:
        yield server


@pytest.fixture(autouse=True)
def _leaves_nothing(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()


def expired(server: RunningServer) -> float:
    return metrics(server)["mlxpaged_requests_finished_total|timeout"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_waits_too_long_never_runs(server: RunningServer, stream: bool) -> None:
    before, count = server.engine.stats, expired(server)
    assert before is not None
    with StepGate(server) as gate:
        running = start(server, run_on(random_tokens(10, 1), 20), "first")
        waiting = start(server, run_on(random_tokens(50, 2), 20, timeout=5, stream=stream), "late")
        gate.allow(3)
        clock.advance(4.9)
        gate.allow(3)
        wait_until(lambda: server.engine.stats.steps_total - before.steps_total == 6)
        assert server.engine.num_unfinished == 2
        clock.advance(0.2)
        gate.allow(1)
        error = check_failure(waiting, 408, "timeout_error", "deadline_exceeded")
        assert server.engine.num_unfinished == 1
        gate.open()
        assert running.result().json()["usage"]["completion_tokens"] == 20
    assert "timeout of 5 s" in error["message"]
    assert "5.100 s" in error["message"]
    assert "waiting" in error["message"]
    assert "0 of 50 prompt tokens computed and 0 tokens generated" in error["message"]
    server.wait_idle()
    after = server.engine.stats
    assert after.model_calls_total - before.model_calls_total == 20
    assert after.scheduler.prompt_tokens_total - before.scheduler.prompt_tokens_total == 10
    assert expired(server) == count + 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_request_that_runs_too_long_ends_within_a_step(server: RunningServer, stream: bool, chat: bool) -> None:
    body = ask("Who are you?", max_tokens=500, ignore_eos=True) if chat else run_on(random_tokens(40, 3), 500)
    steps = server.engine.stats.steps_total
    with StepGate(server) as gate:
        running = start(server, body | {"timeout": 30, "stream": stream}, "slow")
        gate.allow(8)
        wait_until(lambda: server.engine.stats.steps_total == steps + 8)
        gate.wait_held()
        assert server.engine.stats.scheduler.blocks.used > 0
        clock.advance(31)
        gate.allow(1)  # the one in flight; no other is permitted
        error = check_failure(running, 408, "timeout_error", "deadline_exceeded")
        assert server.engine.stats.scheduler.blocks.used == 0
        assert server.engine.stats.steps_total == steps + 9
    assert "running" in error["message"]
    assert "9 tokens generated" in error["message"]
    if not stream:
        assert running.result().headers["x-should-retry"] == "false"


def test_a_stream_that_is_cut_by_its_deadline_has_sent_its_text(server: RunningServer) -> None:
    body = run_on(random_tokens(40, 4), 30)
    whole = answer_text(server, body)
    steps = server.engine.stats.steps_total
    with StepGate(server) as gate:
        stream = start(server, body | {"timeout": 1, "stream": True}, "cut")
        gate.allow(20)
        wait_until(lambda: server.engine.stats.steps_total == steps + 20)
        gate.wait_held()
        clock.advance(1)
        gate.allow(1)
        check_failure(stream, 408, "timeout_error", "deadline_exceeded")
    texts = [line for line in stream.result().text.splitlines() if '"text"' in line]
    assert len(texts) > 3
    received = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in texts)
    assert received
    assert whole.startswith(received)


@pytest.mark.parametrize(("swap_blocks", "state"), [(0, "preempted"), (20, "swapped")])
def test_a_preempted_request_ends_at_its_deadline(demo_server: RunningServer, swap_blocks: int, state: str) -> None:
    block = block_bytes(demo_server)
    config = EngineConfig(kv_cache_bytes=5 * block, swap_space_bytes=swap_blocks * block, prefix_caching=False)
    with running_server(config, clock=clock) as server, StepGate(server) as gate:
        first = start(server, run_on(random_tokens(30, 5), 110), "first")
        second = start(server, run_on(random_tokens(30, 6), 110, timeout=60, service_tier="flex"), "second")
        run_until_preempted(server, gate, "second")
        clock.advance(61)
        gate.allow(1)
        error = check_failure(second, 408, "timeout_error", "deadline_exceeded")
        assert f"was {state}, with 30 of 30 prompt tokens computed" in error["message"]
        assert server.core.scheduler.stats().swap.used == 0
        gate.open()
        assert first.result().json()["usage"]["completion_tokens"] == 110
        server.wait_idle()


def test_the_first_token_has_a_deadline_of_its_own(server: RunningServer) -> None:
    with StepGate(server) as gate:
        running = start(server, run_on(random_tokens(10, 7), 30, ttft_timeout=2), "first")
        gate.allow(2)
        wait_until(lambda: server.engine.stats.scheduler.running == 1)
        waiting = start(server, run_on(random_tokens(10, 8), 30, ttft_timeout=2, timeout=100), "second")
        clock.advance(3)
        gate.allow(1)
        error = check_failure(waiting, 408, "timeout_error", "deadline_exceeded")
        assert "ttft_timeout of 2 s" in error["message"]
        gate.open()
        assert running.result().status_code == 200, "it had its first token in time"


def test_the_server_has_limits_for_requests_that_set_none() -> None:
    config = EngineConfig(kv_cache_bytes=16_000_000, request_timeout=10, ttft_timeout=5)
    with running_server(config, clock=clock) as server:
        clock.tick(server)  # a second per token
        with raw(server) as client:
            assert client.post(COMPLETIONS, json=run_on("x", 9)).status_code == 200
            response = client.post(COMPLETIONS, json=run_on("x", 30))
            assert response.status_code == 408
            assert "timeout of 10 s" in response.json()["error"]["message"]
            longer = run_on("x", 30, timeout=100)
            assert client.post(COMPLETIONS, json=longer).json()["usage"]["completion_tokens"] == 30
        clock.tick(server, 6)
        with raw(server) as client:
            response = client.post(COMPLETIONS, json=run_on(random_tokens(2100, 9), 3))
            assert "ttft_timeout of 5 s" in response.json()["error"]["message"]
        server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_all_choices_of_a_request_end_together(server: RunningServer, stream: bool) -> None:
    before = server.engine.stats.model_calls_total
    with StepGate(server) as gate:
        pending = start(server, run_on("Once", 50, n=3, timeout=1, stream=stream, temperature=1), "three")
        clock.advance(2)
        gate.allow(1)
        check_failure(pending, 408, "timeout_error", "deadline_exceeded")
        wait_until(lambda: server.engine.num_unfinished == 0)
    assert server.engine.stats.model_calls_total - before <= 1


def test_the_official_client_does_not_send_an_expired_request_again(demo_server: RunningServer) -> None:
    count = expired(demo_server)
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=2, timeout=DEADLINE) as client:
        for create, prompt in (
            (client.completions.create, {"prompt": "x"}),
            (client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}]}),
        ):
            options: dict[str, Any] = {"model": "demo", "extra_body": {"timeout": 1e-9}, **prompt}
            with pytest.raises(openai.APIStatusError, match="timeout of 1e-09 s") as error:
                create(**options)
            assert error.value.status_code == 408
            assert error.value.type == "timeout_error"
            with pytest.raises(openai.APIError, match="timeout of 1e-09 s"):
                list(create(stream=True, **options))
    assert expired(demo_server) == count + 4


def test_ends_in_time_leave_no_deadlines_behind(server: RunningServer) -> None:
    with raw(server) as client:
        for _ in range(80):
            assert client.post(COMPLETIONS, json=run_on("x", 1, timeout=3600, ttft_timeout=3600)).status_code == 200
    count = expired(server)
    clock.advance(3601)
    assert answer_text(server, run_on("x", 2))
    assert expired(server) == count


def test_a_request_that_cannot_meet_its_deadline_is_refused_with_the_reason() -> None:
    """After ten prompts, at 10 ms of this clock for every token."""
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), clock=clock) as server:
        forward = server.core.runner.forward

        def timed(batch: Any, *rest: Any) -> Any:
            clock.advance(batch.num_tokens / 100)
            return forward(batch, *rest)

        server.core.runner.forward = timed  # type: ignore[method-assign]
        with raw(server) as client:
            for number in range(10):
                prompt = random_tokens(40 + 40 * number, 20 + number)
                assert client.post(COMPLETIONS, json=run_on(prompt, 2)).status_code == 200
            steps = server.engine.stats.steps_total
            for stream in (True, False):
                body = run_on(random_tokens(1500, 40), 3, ttft_timeout=2, stream=stream)
                hopeless = Background.post(server, COMPLETIONS, body)
                error = check_failure(hopeless, 408, "timeout_error", "deadline_exceeded")
                expected = "ttft_timeout of 2 s cannot be met: the remaining 1500 prompt tokens take about 15.0 s"
                assert error["message"].startswith(expected)
                assert server.engine.stats.steps_total == steps
            possible = run_on(random_tokens(1500, 41), 3, ttft_timeout=20)
            assert client.post(COMPLETIONS, json=possible).status_code == 200
        server.wait_idle()
