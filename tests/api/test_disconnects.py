"""Clients that leave, and more clients than the queue takes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from mlxpaged.core.engine.status import EngineStats
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    Background,
    StepGate,
    answer_text,
    queued_commands,
    random_tokens,
    raw,
    raw_post,
    run_on,
)
from tests.support import RunningServer, running_server, wait_until

COMPLETIONS = "/v1/completions"
LONG = 3000


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[RunningServer]:
    config = EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1, max_queue=1)
    with running_server(config) as server:
        yield server


def stats(server: RunningServer) -> EngineStats:
    assert server.engine.stats is not None
    return server.engine.stats


def reset(connection: socket.socket) -> None:
    """Leave without a word of farewell, as a crashed client does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()


def first_event(connection: socket.socket, gate: StepGate) -> None:
    """Step until there is text; a token may well have none."""
    connection.settimeout(0.2)
    received = b""
    while b'"text"' not in received:
        gate.allow(1)
        with contextlib.suppress(TimeoutError):
            received += connection.recv(65536)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
def test_a_client_that_leaves_frees_its_blocks_and_the_others_go_on(
    demo_server: RunningServer, stream: bool, leave: object
) -> None:
    neighbour = run_on(random_tokens(40, 31), 60)
    expected = answer_text(demo_server, neighbour)
    before = stats(demo_server)
    with StepGate(demo_server) as gate:
        staying = Background.post(demo_server, COMPLETIONS, neighbour | {"stream": True})
        wait_until(lambda: demo_server.engine.num_unfinished == 1)
        leaving = raw_post(demo_server, COMPLETIONS, run_on(random_tokens(40, 32), LONG, stream=stream))
        wait_until(lambda: demo_server.engine.num_unfinished == 2)
        if stream:
            first_event(leaving, gate)
        else:
            gate.allow(5)
        gate.wait_held()
        assert callable(leave)
        leave(leaving)
        wait_until(lambda: queued_commands(demo_server) == 1)
        gate.open()
        assert staying.text == expected
    demo_server.wait_idle()
    assert stats(demo_server).generated_tokens_total - before.generated_tokens_total < LONG / 2
    assert stats(demo_server).scheduler.running == 0


def test_a_client_that_leaves_during_its_prefill_frees_its_blocks(demo_server: RunningServer) -> None:
    before = stats(demo_server)
    with StepGate(demo_server) as gate:
        leaving = raw_post(demo_server, COMPLETIONS, run_on(random_tokens(2100, 33), 500))
        gate.allow(1)  # of two: a step takes 2048 tokens
        wait_until(lambda: stats(demo_server).steps_total > before.steps_total)
        assert stats(demo_server).scheduler.blocks.used >= 64
        gate.wait_held()
        leaving.close()
        wait_until(lambda: queued_commands(demo_server) == 1)
        gate.open()
        demo_server.wait_idle()
    assert stats(demo_server).generated_tokens_total - before.generated_tokens_total <= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_never_runs(one_at_a_time: RunningServer, stream: bool) -> None:
    server, seed = one_at_a_time, 40 + stream
    before = stats(server)
    with StepGate(server) as gate:
        running = Background.post(server, COMPLETIONS, run_on(random_tokens(10, seed), 200))
        wait_until(lambda: server.engine.num_unfinished == 1)
        gate.allow(1)
        waiting = raw_post(server, COMPLETIONS, run_on(random_tokens(50, seed + 10), 20, stream=stream))
        wait_until(lambda: server.engine.num_unfinished == 2)
        gate.allow(3)
        wait_until(lambda: stats(server).scheduler.waiting == 1)
        gate.wait_held()
        waiting.close()
        wait_until(lambda: queued_commands(server) == 1)
        gate.allow(1)
        # Its place in the queue is free within a step, while the other one still runs.
        wait_until(lambda: server.engine.num_unfinished == 1)
        assert stats(server).scheduler.running == 1
        gate.open()
        assert running.result().json()["usage"]["completion_tokens"] == 200
    server.wait_idle()
    after = stats(server)
    assert after.generated_tokens_total - before.generated_tokens_total == 200
    assert after.model_calls_total - before.model_calls_total == 200
    assert after.scheduler.prompt_tokens_total - before.scheduler.prompt_tokens_total == 10


def test_beyond_the_queue_a_request_is_told_to_come_back(one_at_a_time: RunningServer) -> None:
    server = one_at_a_time
    with StepGate(server) as gate, raw(server) as client:
        pending = []
        for i in range(2):
            pending.append(Background.post(server, COMPLETIONS, run_on(random_tokens(10, 60 + i), 10)))
            wait_until(lambda n=i: server.engine.num_unfinished == n + 1)  # type: ignore[misc]
        for body in (run_on("x", 1), run_on("x", 1, stream=True)):
            response = client.post(COMPLETIONS, json=body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
            assert "--max-queue" in response.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        gate.open()
        assert [request.result().status_code for request in pending] == [200, 200]
        server.wait_idle()
        assert client.post(COMPLETIONS, json=run_on("x", 1)).status_code == 200


def test_more_prompts_than_the_server_ever_takes_are_refused_for_good(one_at_a_time: RunningServer) -> None:
    with raw(one_at_a_time) as client:
        response = client.post(COMPLETIONS, json=run_on(["a", "b", "c"], 1000))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert one_at_a_time.engine.num_unfinished == 0


def test_a_full_server_refuses_before_it_tokenizes(
    one_at_a_time: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = one_at_a_time
    with StepGate(server) as gate, raw(server) as client:
        pending = [Background.post(server, COMPLETIONS, run_on(random_tokens(10, 60 + i), 10)) for i in range(2)]
        wait_until(lambda: server.engine.num_unfinished == 2)
        tokenized: list[str] = []
        monkeypatch.setattr(type(server.engine.info.tokenizer), "encode", lambda self, text: tokenized.append(text))
        assert client.post(COMPLETIONS, json=run_on("x", 1)).status_code == 503
        assert not tokenized
        gate.open()
        assert [request.result().status_code for request in pending] == [200, 200]
    server.wait_idle()


def test_a_storm_of_cancelled_requests_leaves_nothing_behind(demo_server: RunningServer) -> None:
    prompt = random_tokens(200, 70)
    for i in range(60):
        with contextlib.closing(raw_post(demo_server, COMPLETIONS, run_on(prompt, LONG, stream=i % 2 == 0))) as leaving:
            if i % 6 == 0:
                leaving.recv(1)  # the head of a stream, sent at once
    demo_server.wait_idle()
    assert answer_text(demo_server, run_on("Once", 4))
