"""An allocation that fails ends or delays the request that needs it. The others, and the server, go on."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.api import body as bodies
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.engine_config import EngineConfig
from mlxpaged.parts.grammar import grammar
from tests.api.helpers import (
    answer_text,
    ask,
    post,
    random_tokens,
    raw,
    run_on,
    stream_at_once,
    stream_together,
)
from tests.support import RunningServer, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT = 3
"""max_tokens of the request that a fault is for."""

FAULT = RuntimeError("[malloc] Unable to allocate 8388608 bytes.")
"""MLX's on a GPU."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Of this file alone: for a while after a failure, the pool does not grow."""
    with running_server(EngineConfig(kv_cache_bytes=64_000_000)) as server:
        yield server


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert response.headers["Retry-After"] == "1"
    assert response.json()["error"]["code"] == "out_of_memory"


@pytest.fixture(autouse=True)
def _the_server_goes_on(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
    assert server.engine.state is EngineState.READY
    assert answer_text(server, ask("What is 17 + 25?")) == "42"


@contextlib.contextmanager
def failing_forward(server: RunningServer, fault: Exception, times: int = 10**9, least: int = 1) -> Iterator[list[int]]:
    """The first `times` forward passes of `least` tokens or more with the request of SHORT tokens fail, or with any if
    there is none. Yields the tokens of all passes."""
    runner = server.core.runner
    forward, sequences, seen, failures = runner.forward, server.core.scheduler.sequences, [], []

    def faulty(batch: Any, *rest: Any) -> Any:
        seen.append(batch.num_tokens)
        hit = times < 10**9 or any(sequences[row.sequence_id].max_tokens == SHORT for row in batch.rows)
        if hit and batch.num_tokens >= least and len(failures) < times:
            failures.append(batch)
            raise fault
        return forward(batch, *rest)

    runner.forward = faulty  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        runner.forward = forward  # type: ignore[method-assign]


def test_a_request_that_has_no_memory_for_its_step_is_refused_alone(server: RunningServer) -> None:
    others = [run_on(random_tokens(40, i), 8) for i in range(2)]
    expected = [answer_text(server, body) for body in others]
    outcome: list[httpx.Response] = []

    def ask_in_vain() -> None:
        with raw(server) as client:
            outcome.append(client.post(COMPLETIONS, json=run_on(random_tokens(40, 9), SHORT)))

    with failing_forward(server, FAULT):
        thread = threading.Thread(target=ask_in_vain)
        thread.start()
        assert stream_together(server, others) == expected
        thread.join()
    check_refused(outcome[0])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_stream_gets_the_error_in_the_format_of_its_api(server: RunningServer, path: str) -> None:
    body = run_on("a", SHORT) if path == COMPLETIONS else ask("Hi", max_tokens=SHORT)
    if path == "/v1/responses":
        body = {"input": "Hi", "max_output_tokens": SHORT, "model": "demo"}
    if path == "/api/chat":
        body = {"model": "demo", "messages": body["messages"], "options": {"num_predict": SHORT}}
    with failing_forward(server, MemoryError()), raw(server) as client:
        response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert "the step failed: MemoryError" in response.text.strip().splitlines()[-1]


def test_a_long_prompt_goes_on_in_smaller_steps(server: RunningServer) -> None:
    body = run_on(random_tokens(600, 5), 8)
    expected = answer_text(server, body)
    server.run(server.engine.clear_cache()).result()
    with failing_forward(server, FAULT, times=1, least=500) as seen:
        assert answer_text(server, body) == expected
    first = next(tokens for tokens in seen if tokens > 32)
    assert first >= 500
    assert seen[seen.index(first) + 1] <= first // 2
    assert max(seen[seen.index(first) + 1 :]) < first


def test_decoding_requests_lose_no_token(server: RunningServer) -> None:
    requests = [run_on(random_tokens(20, i), 8) for i in range(3)]
    expected = [answer_text(server, body) for body in requests]
    sampler = server.core.sampler
    sample, failures = sampler.sample, []

    def faulty(logits: Any, rows: Any) -> Any:
        if len(rows) == 3 and not failures:
            failures.append(rows)
            raise FAULT
        return sample(logits, rows)

    sampler.sample = faulty  # type: ignore[method-assign]
    try:
        assert stream_at_once(server, requests) == expected
    finally:
        sampler.sample = sample  # type: ignore[method-assign]
    assert failures


def test_after_a_failure_no_request_is_admitted_until_a_step_succeeds(server: RunningServer) -> None:
    scheduler, sampler = server.core.scheduler, server.core.sampler
    sample, admits = sampler.sample, []

    def faulty(logits: Any, rows: Any) -> Any:
        admits.append(scheduler.admits)
        if len(admits) == 1:
            raise MemoryError
        return sample(logits, rows)

    sampler.sample = faulty  # type: ignore[method-assign]
    try:
        post(server, run_on("a", 4))
    finally:
        sampler.sample = sample  # type: ignore[method-assign]
    assert admits[:3] == [True, False, True]


def test_a_request_that_the_engine_cannot_take_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(server.core.scheduler, "add", faulty)
    with raw(server) as client:
        check_refused(client.post(COMPLETIONS, json=run_on("a", 4)))
    monkeypatch.undo()


def test_a_token_that_cannot_become_text_ends_its_request(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(RunningRequest, "advance", faulty)
    with raw(server) as client:
        check_refused(client.post(COMPLETIONS, json=run_on("a", 4)))
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("body", MemoryError()),
        ("tokenizer", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("grammar", MemoryError()),
        ("thread", RuntimeError("can't start new thread")),
    ],
)
def test_what_fails_before_the_engine_is_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, what: str, fault: Exception
) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise fault

    info = server.engine.info
    targets: dict[str, tuple[Any, str]] = {
        "body": (bodies, "parse"),
        "tokenizer": (type(info.tokenizer), "encode"),
        "grammar": (info.grammars, "compile_here"),
        "thread": (grammar, "in_daemon_thread"),
    }
    constraint = {"guided_regex": f"[a-z]{{{len(what)}}}"}
    with raw(server) as client:
        with monkeypatch.context() as patch:
            patch.setattr(*targets[what], faulty)
            for _ in range(3):  # one more than compile at once: a failure keeps no place
                check_refused(client.post(COMPLETIONS, json=run_on("a", 4) | constraint))
        assert client.post(COMPLETIONS, json=run_on("a", 4) | constraint).status_code == 200
