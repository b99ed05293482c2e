"""Steps that fail and an engine that dies: errors reach those they concern, and only those."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    Background,
    StepGate,
    answer_text,
    ask,
    block_bytes,
    events,
    metrics,
    random_tokens,
    raw,
    run_on,
    stream_at_once,
    stream_events,
    tokens_of,
)
from tests.support import RunningServer, poison_new_blocks, running_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

pytestmark = pytest.mark.filterwarnings("error")


@contextlib.contextmanager
def failing(server: RunningServer, token: int) -> Iterator[list[int]]:
    """Every forward pass over `token` raises; yields the batch sizes of those that did."""
    runner = server.core.runner
    forward, failed = runner.forward, []

    def faulty(batch: Any, *rest: Any) -> Any:
        if any(token in row.token_ids for row in batch.rows):
            failed.append(len(batch.rows))
            raise RuntimeError("injected fault")
        return forward(batch, *rest)

    runner.forward = faulty  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        runner.forward = forward  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=32_000_000)) as server:
        poison_new_blocks(server.core)
        yield server
        server.wait_idle()


def bad_token(server: RunningServer) -> int:
    [token] = tokens_of(server, "%")
    return token


def without(token: int, tokens: list[int]) -> list[int]:
    return [20 if each == token else each for each in tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_fails_only_the_request_that_causes_it(server: RunningServer, stream: bool) -> None:
    bad = bad_token(server)
    prefix = without(bad, random_tokens(64, 1 + stream))
    neighbours = [run_on(without(bad, prefix + random_tokens(9, i)), 12) for i in range(4)] + [ask("What is 17 + 25?")]
    expected = [answer_text(server, body) for body in neighbours]
    assert not any("%" in text for text in expected)
    culprit = run_on([*prefix, bad, *random_tokens(5, 9)], 12, stream=stream)
    with failing(server, bad) as failed, StepGate(server) as gate:
        pending = [Background.post(server, CHAT if "messages" in b else COMPLETIONS, b) for b in neighbours[:2]]
        wait_until(lambda: server.engine.num_unfinished == 2)
        doomed = Background.post(server, COMPLETIONS, culprit)
        wait_until(lambda: server.engine.num_unfinished == 3)
        pending += [Background.post(server, CHAT if "messages" in b else COMPLETIONS, b) for b in neighbours[2:]]
        wait_until(lambda: server.engine.num_unfinished == 6)
        gate.open()
        assert [request.text for request in pending] == expected
        response = doomed.result()
    assert failed[-1] == 1
    if stream:
        assert response.status_code == 200
        [error] = [event for event in events(iter(response.text.splitlines())) if "error" in event]
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 500
        error = response.json()
    assert error["error"]["type"] == "server_error"
    assert error["error"]["code"] == "generation_failed"
    assert "injected fault" in error["error"]["message"]
    server.wait_idle()
    assert answer_text(server, ask("What is 17 + 25?")) == "42"
    assert len(answer_text(server, culprit | {"stream": False})) > 0


def test_the_official_client_sees_both_kinds_of_failure(server: RunningServer) -> None:
    bad = bad_token(server)
    with failing(server, bad), server.client() as client:
        with pytest.raises(openai.InternalServerError, match="injected fault") as error:
            client.completions.create(model="demo", prompt=[bad, 20], max_tokens=4)
        assert error.value.status_code == 500
        with pytest.raises(openai.APIError, match="injected fault"):
            list(client.completions.create(model="demo", prompt=[bad, 20], max_tokens=4, stream=True))
    server.wait_idle()


def test_a_failure_in_the_middle_of_an_answer_ends_the_stream_with_an_error(server: RunningServer) -> None:
    body = run_on(random_tokens(40, 3), 12, logit_bias={str(bad_token(server)): 100})
    with failing(server, bad_token(server)):
        chunks = stream_events(server, COMPLETIONS, body)
    assert chunks[0]["choices"][0]["text"] == "%"
    assert chunks[-1]["error"]["code"] == "generation_failed"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    server.wait_idle()


def test_one_failing_prompt_of_a_request_fails_the_request(server: RunningServer) -> None:
    bad = bad_token(server)
    with failing(server, bad), raw(server) as client:
        response = client.post(COMPLETIONS, json=run_on([[20, 21], [bad, 22], [23, 24]], 500))
    assert response.status_code == 500
    server.wait_idle()


def test_a_failure_that_does_not_repeat_loses_no_request(server: RunningServer) -> None:
    bodies = [run_on(random_tokens(70, 7) + random_tokens(20, i), 16) for i in range(6)]
    expected = [answer_text(server, body) for body in bodies]
    runner = server.core.runner
    forward, failures = runner.forward, []

    def faulty_now_and_then(batch: Any, *rest: Any) -> Any:
        if len(batch.rows) == 6 and len(failures) < 3:
            failures.append(batch)
            raise RuntimeError("injected fault")
        return forward(batch, *rest)

    runner.forward = faulty_now_and_then  # type: ignore[method-assign]
    try:
        assert stream_at_once(server, bodies) == expected
    finally:
        runner.forward = forward  # type: ignore[method-assign]
    assert len(failures) == 3
    server.wait_idle()


def test_a_failure_after_the_forward_pass_loses_no_request_either(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [run_on(random_tokens(30, i), 16) for i in range(4)]
    expected = [answer_text(server, body) for body in bodies]
    sampler = server.core.sampler
    sample, failures = sampler.sample, []

    def faulty_once(logits: Any, rows: Any) -> Any:
        if len(rows) == 4 and not failures:
            failures.append(rows)
            raise RuntimeError("injected fault")
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", faulty_once)
    assert stream_at_once(server, bodies) == expected
    assert failures
    server.wait_idle()


def test_a_dead_engine_ends_every_request_and_says_so() -> None:
    with running_server(EngineConfig(kv_cache_bytes=16_000_000, max_num_seqs=1)) as server, raw(server) as client:
        assert answer_text(server, ask("What is 17 + 25?")) == "42"
        schedule, calls = server.core.scheduler.schedule, []

        def dying() -> Any:
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("injected death")
            return schedule()

        with StepGate(server) as gate:
            stream = Background.post(server, COMPLETIONS, run_on("a", 50, stream=True))
            wait_until(lambda: server.engine.num_unfinished == 1)
            others = [Background.post(server, COMPLETIONS, run_on("b", 50)) for _ in range(2)]
            wait_until(lambda: server.engine.num_unfinished == 3)
            server.core.scheduler.schedule = dying  # type: ignore[method-assign]
            gate.open()
            received = list(events(iter(stream.result().text.splitlines())))
        assert "injected death" in received[-1]["error"]["message"]
        for other in others:
            assert other.result().status_code == 503
            assert "injected death" in other.result().json()["error"]["message"]
        wait_until(lambda: server.engine.state is EngineState.DEAD)
        assert server.engine.num_unfinished == 0
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert "injected death" in health.json()["reason"]
        response = client.post(CHAT, json=ask("x"))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert client.get("/metrics").status_code == 200
        [model] = client.get("/v1/models").json()["data"]
        assert model["state"] == "failed"


def test_streams_of_every_api_end_with_its_error_where_the_engine_dies() -> None:
    question = ask("Repeat: " + "blue river stone " * 10, stream=True)
    bodies: dict[str, dict[str, Any]] = {
        CHAT: question,
        COMPLETIONS: run_on("a", 50, stream=True),
        "/v1/messages": question | {"max_tokens": 50},
        "/v1/responses": {"input": question["messages"], "temperature": 0, "stream": True},
    }
    with running_server(EngineConfig(kv_cache_bytes=16_000_000)) as server:
        schedule, calls = server.core.scheduler.schedule, []

        def dying() -> Any:
            calls.append(1)
            if len(calls) == 10:
                raise RuntimeError("injected death")
            return schedule()

        with StepGate(server) as gate:
            streams = {path: Background.post(server, path, body) for path, body in bodies.items()}
            wait_until(lambda: server.engine.num_unfinished == len(bodies))
            server.core.scheduler.schedule = dying  # type: ignore[method-assign]
            gate.open()
            texts = {path: stream.result().text.rstrip() for path, stream in streams.items()}
    last = {path: json.loads(text.rpartition("data: ")[2]) for path, text in texts.items()}
    assert last["/v1/messages"]["type"] == "error"
    assert last["/v1/responses"]["type"] == "response.failed"
    for path, text in texts.items():
        assert "injected death" in last[path].get("response", last[path])["error"]["message"]
        assert text.count("data: ") > 5, "it was in the middle of the answer"


def test_an_engine_that_dies_with_swapped_requests_reports_no_block_in_use(demo_server: RunningServer) -> None:
    block = block_bytes(demo_server)
    with running_server(EngineConfig(kv_cache_bytes=6 * block, swap_space_bytes=20 * block)) as server:
        before, scheduler = metrics(server), server.core.scheduler
        schedule = scheduler.schedule

        def dying() -> Any:
            if scheduler.stats().swap.used:
                raise RuntimeError("injected death")
            return schedule()

        bodies = [run_on(random_tokens(40, i), 90) for i in range(4)]
        with StepGate(server) as gate:
            pending = [Background.post(server, COMPLETIONS, body) for body in bodies]
            wait_until(lambda: server.engine.num_unfinished == len(bodies))
            scheduler.schedule = dying  # type: ignore[method-assign]
            gate.open()
        assert [request.result().status_code for request in pending] == [503] * 4
        after = metrics(server)
        for place in ("kv", "swap"):
            assert after[f"mlxpaged_{place}_blocks|used"] == 0
            assert after[f"mlxpaged_{place}_blocks|free"] == before[f"mlxpaged_{place}_blocks|free"]


def test_a_request_that_is_no_longer_running_cannot_fail_the_engine(server: RunningServer) -> None:
    """Aborting all is what the end of the drain does; requests that finish at the same time are no error."""
    with StepGate(server) as gate:
        pending = [Background.post(server, COMPLETIONS, run_on("a", 2)) for _ in range(3)]
        wait_until(lambda: server.engine.num_unfinished == 3)
        gate.open()
        assert [request.result().status_code for request in pending] == [200] * 3
    server.wait_idle()
    assert server.engine.state is EngineState.READY


def test_a_conversation_that_the_template_renders_to_nothing_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.engine.info.tokenizer
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: [])
    with raw(server) as client:
        response = client.post(CHAT, json=ask(""))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert server.engine.state is EngineState.READY


def test_a_request_that_the_engine_will_not_take_fails_alone(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every check before it passed, by mistake: the engine thread refuses it, and goes on."""
    add = server.core.scheduler.add

    def refusing(sequence: Any, *waits: Any) -> None:
        if sequence.max_tokens == 3:
            raise ValueError("not this one")
        add(sequence, *waits)

    monkeypatch.setattr(server.core.scheduler, "add", refusing)
    with raw(server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 3))
        assert response.status_code == 500
        assert "not this one" in response.json()["error"]["message"]
        assert client.post(COMPLETIONS, json=run_on("x", 2)).status_code == 200
    server.wait_idle()


def test_a_detokenizer_that_fails_ends_its_request_alone(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = RunningRequest.advance

    def failing(running: RunningRequest, *token: Any) -> Any:
        if running.request.params.max_tokens == 3:
            raise LookupError("no such token")
        return advance(running, *token)

    monkeypatch.setattr(RunningRequest, "advance", failing)
    with raw(server) as client:
        response = client.post(COMPLETIONS, json=run_on("x", 3))
        assert response.status_code == 500
        assert "no such token" in response.json()["error"]["message"]
        assert client.post(COMPLETIONS, json=run_on("x", 2)).status_code == 200
    server.wait_idle()
    assert server.engine.state is EngineState.READY
