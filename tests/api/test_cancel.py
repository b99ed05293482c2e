"""Requests that are cancelled by their ids, and the ids themselves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxpaged.core.engine.errors import EngineState
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    DEADLINE,
    Background,
    StepGate,
    answer_text,
    ask,
    block_bytes,
    check_failure,
    metrics,
    queued_commands,
    random_tokens,
    raw,
    run_on,
    run_until_preempted,
    start,
    within_one_step,
)
from tests.support import RunningServer, running_server, wait_until

CHAT, COMPLETIONS, REQUESTS = "/v1/chat/completions", "/v1/completions", "/v1/requests"
CANCELLED = (499, "request_cancelled", "request_cancelled")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1, max_queue=20)) as server:
        yield server


@pytest.fixture(autouse=True)
def _leaves_nothing(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
    assert list(server.app.state.server.open_requests) == []
    usage = server.core.scheduler.pool.usage()
    assert (usage.used, usage.cached + usage.free) == (0, server.core.scheduler.pool.num_blocks)


def delete(server: RunningServer, path: str) -> httpx.Response:
    with raw(server) as client:
        return client.delete(path)


def check_unknown(response: httpx.Response) -> None:
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert response.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_running_request_is_cancelled_within_a_step(server: RunningServer, stream: bool, chat: bool) -> None:
    body = ask("Who are you?", max_tokens=500, ignore_eos=True) if chat else run_on(random_tokens(40, 1), 500)
    before, count = server.engine.stats, metrics(server)["mlxpaged_requests_finished_total|cancelled"]
    with StepGate(server) as gate:
        running = start(server, body | {"stream": stream}, "it")
        gate.allow(5)
        response = within_one_step(server, gate, "DELETE", f"{REQUESTS}/it")
        assert response.status_code == 200
        assert response.json() == {
            "id": "it",
            "object": "request",
            "cancelled": True,
            "choices": [{"id": "it", "status": "running", "completion_tokens": 6}],
        }
        assert server.core.scheduler.pool.usage().used == 0
        check_failure(running, *CANCELLED)
    server.wait_idle()
    assert server.engine.stats.model_calls_total - before.model_calls_total == 6
    assert metrics(server)["mlxpaged_requests_finished_total|cancelled"] == count + 1
    check_unknown(delete(server, f"{REQUESTS}/it"))


@pytest.mark.parametrize("path", [f"{REQUESTS}/it", REQUESTS])
def test_a_request_is_cancelled_while_its_ranks_start_again(server: RunningServer, path: str) -> None:
    engine = server.engine
    with StepGate(server) as gate:
        running = start(server, run_on(random_tokens(40, 1), 500), "it")
        gate.wait_held()
        engine.slot.callbacks.on_restart("rank 1 died")
        wait_until(lambda: engine.state is EngineState.LOADING)
        answer = within_one_step(server, gate, "DELETE", path).json()
        assert [each["id"] for each in answer.get("data", [answer])] == ["it"]
        check_failure(running, *CANCELLED)
        assert engine.info is not None
        assert engine.stats is not None
        engine.slot.callbacks.on_ready(engine.info, engine.stats)
        wait_until(lambda: engine.state is EngineState.READY)


@pytest.mark.parametrize("stream", [True, False])
def test_a_waiting_request_that_is_cancelled_never_runs(server: RunningServer, stream: bool) -> None:
    before = server.engine.stats
    with StepGate(server) as gate:
        running = start(server, run_on(random_tokens(10, 2), 20), "first")
        waiting = start(server, run_on(random_tokens(50, 3), 20, stream=stream), "second")
        response = within_one_step(server, gate, "DELETE", f"{REQUESTS}/second")
        assert response.json()["choices"] == [{"id": "second", "status": "waiting", "completion_tokens": 0}]
        check_failure(waiting, *CANCELLED)
        assert server.engine.num_unfinished == 1
        gate.open()
        assert running.result().json()["usage"]["completion_tokens"] == 20
    server.wait_idle()
    after = server.engine.stats
    assert after.model_calls_total - before.model_calls_total == 20
    assert after.generated_tokens_total - before.generated_tokens_total == 20
    assert after.scheduler.prompt_tokens_total - before.scheduler.prompt_tokens_total == 10


@pytest.mark.parametrize(("swap_blocks", "state"), [(0, "preempted"), (20, "swapped")])
def test_a_preempted_request_that_is_cancelled_does_not_come_back(
    demo_server: RunningServer, swap_blocks: int, state: str
) -> None:
    block = block_bytes(demo_server)
    config = EngineConfig(kv_cache_bytes=5 * block, swap_space_bytes=swap_blocks * block, prefix_caching=False)
    with running_server(config) as server, StepGate(server) as gate:
        first = start(server, run_on(random_tokens(30, 5), 110), "first")
        second = start(server, run_on(random_tokens(30, 6), 110, service_tier="flex"), "second")
        run_until_preempted(server, gate, "second")
        swap = within_one_step(server, gate, "GET", "/v1/status").json()["swap"]
        assert (swap["used"] > 0, swap["total"]) == (swap_blocks > 0, swap_blocks)
        generated = within_one_step(server, gate, "DELETE", f"{REQUESTS}/second").json()["choices"]
        assert [choice["status"] for choice in generated] == [state]
        assert server.core.scheduler.stats().swap.used == 0
        assert generated[0]["completion_tokens"] > 0
        check_failure(second, *CANCELLED)
        gate.open()
        assert first.result().json()["usage"]["completion_tokens"] == 110
        server.wait_idle()
        assert server.core.scheduler.pool.usage().free == 5


def test_all_requests_are_ended_at_once(server: RunningServer) -> None:
    before = server.engine.stats
    with StepGate(server) as gate:
        bodies = [run_on(random_tokens(20, i), 50, stream=i % 2 == 0) for i in range(4)]
        bodies.append(run_on("x", 50, n=3))
        pending = [start(server, body, f"request-{i}") for i, body in enumerate(bodies)]
        response = within_one_step(server, gate, "DELETE", REQUESTS)
        assert response.status_code == 200
        assert response.json()["object"] == "list"
        ended = response.json()["data"]
        assert [request["id"] for request in ended] == [f"request-{i}" for i in range(5)]
        assert [len(request["choices"]) for request in ended] == [1, 1, 1, 1, 3]
        assert [request["choices"][0]["status"] for request in ended] == ["running"] + ["waiting"] * 4
        for request in pending:
            check_failure(request, *CANCELLED)
        assert server.engine.num_unfinished == 0
    server.wait_idle()
    assert server.engine.stats.model_calls_total - before.model_calls_total == 1
    assert delete(server, REQUESTS).json() == {"object": "list", "data": []}
    assert answer_text(server, ask("What is 17 + 25?")) == "42"


@pytest.mark.parametrize("name", ["several", "several-0", "several-2"])
def test_all_choices_end_together_by_any_of_their_ids(server: RunningServer, name: str) -> None:
    with StepGate(server) as gate:
        pending = start(server, run_on(["a", "b"], 50, n=2), "several")
        response = within_one_step(server, gate, "DELETE", f"{REQUESTS}/{name}")
        assert response.json()["id"] == "several"
        assert [choice["id"] for choice in response.json()["choices"]] == [f"several-{i}" for i in range(4)]
        check_failure(pending, *CANCELLED)


def test_an_unknown_id_is_not_found(server: RunningServer) -> None:
    for name in ("unknown", "chatcmpl-0", "a/b", "%00", "x" * 300):
        check_unknown(delete(server, f"{REQUESTS}/{name}"))


def test_an_empty_id_ends_no_request(server: RunningServer) -> None:
    """A client that leaves the id empty must not end all requests."""
    with StepGate(server) as gate:
        pending = start(server, run_on("x", 5), "running")
        with httpx.Client(follow_redirects=True, trust_env=False, verify=False) as client:
            check_unknown(client.delete(f"{server.url}{REQUESTS}/"))
        gate.open()
        assert pending.result().status_code == 200


def test_a_request_can_be_cancelled_before_it_is_in_the_queue(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = type(server.engine.info.tokenizer)
    encode, tokenizing, go_on = tokenizer.encode, threading.Event(), threading.Event()

    def slow_encode(self: Any, *arguments: Any, **options: Any) -> list[int]:
        tokenizing.set()
        assert go_on.wait(DEADLINE)
        return encode(self, *arguments, **options)

    monkeypatch.setattr(tokenizer, "encode", slow_encode)
    before = server.engine.stats.model_calls_total
    pending = Background.post(server, COMPLETIONS, run_on("x", 5), X_Request_Id="early")
    assert tokenizing.wait(DEADLINE)
    assert delete(server, f"{REQUESTS}/early").json() == {
        "id": "early",
        "object": "request",
        "cancelled": True,
        "choices": [],
    }
    go_on.set()
    check_failure(pending, *CANCELLED)
    assert server.engine.stats.model_calls_total == before


def test_the_official_client_does_not_send_a_cancelled_request_again(server: RunningServer) -> None:
    errors = []

    def create() -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2, timeout=DEADLINE) as client:
            try:
                client.completions.create(model="demo", prompt="x", extra_headers={"X-Request-Id": "official"})
            except openai.APIStatusError as error:
                errors.append(error)

    with StepGate(server) as gate:
        thread = threading.Thread(target=create)
        thread.start()
        wait_until(lambda: server.engine.num_unfinished == 1)
        assert within_one_step(server, gate, "DELETE", f"{REQUESTS}/official").status_code == 200
        thread.join(DEADLINE)
    assert [(error.status_code, error.type) for error in errors] == [(499, "request_cancelled")]


def test_without_a_model_there_is_nothing_to_cancel() -> None:
    with running_server(None) as server:
        check_unknown(delete(server, f"{REQUESTS}/x"))
        assert delete(server, REQUESTS).json()["data"] == []


def test_a_cancellation_of_a_dying_engine_is_answered(server: RunningServer) -> None:
    """What is asked while the last step runs, or after it, never gets its turn; it must not hang."""
    with running_server(EngineConfig(kv_cache_bytes=16_000_000)) as dying, StepGate(dying) as gate:
        pending = start(dying, run_on("a", 50), "a")
        gate.wait_held()

        def dead() -> Any:
            raise RuntimeError("injected death")

        dying.core.scheduler.update = lambda *_: dead()  # type: ignore[method-assign]
        questions = [
            Background.request(dying, method, path)
            for method, path in (("DELETE", f"{REQUESTS}/a"), ("GET", "/v1/status"), ("POST", "/v1/cache/clear"))
        ]
        wait_until(lambda: queued_commands(dying) == 3)
        gate.open()
        assert pending.result().status_code == 503
        cancelled, status, cleared = (question.result() for question in questions)
        for question in (cancelled, cleared):
            assert question.status_code == 503
            assert question.json()["error"]["code"] == "engine_dead"
        assert (status.status_code, status.json()["state"]) == (200, "dead")
        wait_until(lambda: dying.engine.state is EngineState.DEAD)
        with raw(dying) as client:
            assert client.get("/v1/status").json()["state"] == "dead"
            assert "injected death" in client.get("/v1/status").json()["reason"]
            assert client.post("/v1/cache/clear").status_code == 503
        check_unknown(delete(dying, f"{REQUESTS}/a"))


# -- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [ask("x", max_tokens=2), run_on("x", 2)], ids=["chat", "completion"])
def test_a_response_carries_its_id_in_body_and_header(
    server: RunningServer, body: dict[str, Any], stream: bool
) -> None:
    path = CHAT if "messages" in body else COMPLETIONS
    with raw(server) as client:
        response = client.post(path, json=body | {"stream": stream})
        assert re.fullmatch(r"(chatcmpl|cmpl)-[0-9a-f]{32}", response.headers["x-request-id"])
        assert f'"id":"{response.headers["x-request-id"]}"' in response.text
        for _ in range(2):  # free again as soon as it is answered
            response = client.post(path, json=body | {"stream": stream}, headers={"X-Request-Id": "my.own_id-1"})
            assert response.status_code == 200
            assert response.headers["x-request-id"] == "my.own_id-1"
            assert '"id":"my.own_id-1"' in response.text


def test_every_response_names_its_request(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(server) as client:
        for method, path in (
            ("GET", "/health"),
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("GET", "/v1/status"),
            ("GET", "/nothing"),
            ("PUT", CHAT),
            ("POST", CHAT),
            ("DELETE", f"{REQUESTS}/unknown"),
        ):
            assert client.request(method, path).headers["x-request-id"].startswith("req-")
            given = client.request(method, path, headers={"X-Request-Id": "a-b_c.1"})
            assert given.headers.get_list("x-request-id") == ["a-b_c.1"]

        def broken(*_: object) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(type(server.engine.info.tokenizer), "encode", broken)
        response = client.post(COMPLETIONS, json=run_on("x", 1), headers={"X-Request-Id": "unlucky"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "unlucky"


@pytest.mark.parametrize("given", ["", " ", "a b", "a/b", "x" * 129, "é", "a:b", "a\tb", ".", "..", "a\r"])
def test_an_id_that_no_url_could_name_is_refused(server: RunningServer, given: str) -> None:
    with raw(server) as client:
        headers = {"X-Request-Id": given.encode()}
        try:
            response = client.post(COMPLETIONS, json=run_on("x", 1), headers=headers)
        except httpx.LocalProtocolError:
            return
        assert response.status_code == 400
        if response.headers["content-type"] == "application/json":
            assert response.json()["error"]["param"] == "X-Request-Id"
            assert response.headers["x-request-id"].startswith("req-")
        longest = client.post(COMPLETIONS, json=run_on("x", 1), headers={"X-Request-Id": "x" * 128})
        assert longest.status_code == 200


def test_an_id_in_use_is_refused(server: RunningServer) -> None:
    with StepGate(server) as gate, raw(server) as client:
        first = start(server, run_on("x", 3), "mine")
        several = start(server, run_on("x", 3, n=2), "ours")
        for taken, n in (("mine", 1), ("mine", 2), ("ours", 1), ("ours-1", 1), ("ours-0", 2)):
            body = run_on("x", 1, n=n)
            response = client.post(COMPLETIONS, json=body, headers={"X-Request-Id": taken})
            assert response.status_code == 409
            assert response.json()["error"]["param"] == "X-Request-Id"
            assert response.json()["error"]["code"] == "request_id_in_use"
            assert response.headers["x-request-id"] == taken
        assert server.engine.num_unfinished == 3
        gate.open()
        assert first.result().status_code == several.result().status_code == 200


def test_an_id_stays_taken_until_the_engine_has_let_go_of_it(server: RunningServer) -> None:
    """Its client has left, and the step in flight still computes its row."""
    with StepGate(server) as gate, raw(server) as client:
        with client.stream("POST", COMPLETIONS, json=run_on("x", 50, stream=True), headers={"X-Request-Id": "gone"}):
            gate.wait_held()
        wait_until(lambda: not list(server.app.state.server.open_requests))
        assert client.post(COMPLETIONS, json=run_on("x", 1), headers={"X-Request-Id": "gone"}).status_code == 409
        gate.allow(1)
        wait_until(lambda: server.engine.num_unfinished == 0)
        gate.open()
        assert client.post(COMPLETIONS, json=run_on("x", 1), headers={"X-Request-Id": "gone"}).status_code == 200
