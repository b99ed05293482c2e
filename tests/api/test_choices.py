"""Several answers to one prompt: n and best_of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import (
    Background,
    StepGate,
    ask,
    check_failure,
    post,
    queued_commands,
    random_tokens,
    raw,
    raw_post,
    run_on,
    start,
    stream_events,
    text_of,
    tokens_of,
    within_one_step,
)
from tests.support import RunningServer, running_server, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DIVERSE = {"temperature": 2.0, "frequency_penalty": 2, "presence_penalty": 2}
"""The demo model is sure of itself: without this most samples would be equal."""


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=32_000_000, max_num_seqs=1, max_queue=2)) as server:
        yield server
        server.wait_idle()


def of_choice(chunks: list[Any], index: int) -> list[Any]:
    """The chunks of one choice, without [DONE] and without those for all."""
    return [chunk for chunk in chunks if chunk != "[DONE]" and [c["index"] for c in chunk["choices"]] == [index]]


def test_three_choices_are_three_requests_with_seeds_in_a_row(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Who are you?"}]
    options: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 20} | DIVERSE
    alone = [client.chat.completions.create(seed=seed, **options).choices[0] for seed in (7, 8, 9)]
    together = client.chat.completions.create(seed=7, n=3, **options)
    assert len({choice.message.content for choice in alone}) == 3
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.message.content for choice in together.choices] == [choice.message.content for choice in alone]
    assert [choice.finish_reason for choice in together.choices] == [choice.finish_reason for choice in alone]
    streamed = ["", "", ""]
    ends: list[Any] = [None] * 3
    roles = []
    for chunk in client.chat.completions.create(seed=7, n=3, stream=True, **options):
        [choice] = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
        roles += [choice.index] if choice.delta.role else []
    assert streamed == [choice.message.content for choice in alone]
    assert ends == [choice.finish_reason for choice in alone]
    assert roles == [0, 1, 2]


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(demo_server: RunningServer) -> None:
    prompts = [random_tokens(40, 1), random_tokens(70, 2)]
    options: dict[str, Any] = {"temperature": 1.0, "logprobs": 1, "frequency_penalty": 1}
    alone = [
        post(demo_server, run_on(prompt, 12, seed=seed, **options))["choices"][0]
        for prompt in prompts
        for seed in (3, 4, 5)
    ]
    body = run_on(prompts, 12, seed=3, n=3, **options)
    together = post(demo_server, body)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert [choice["text"] for choice in together["choices"]] == [choice["text"] for choice in alone]
    assert [c["logprobs"]["tokens"] for c in together["choices"]] == [c["logprobs"]["tokens"] for c in alone]
    chunks = stream_events(demo_server, COMPLETIONS, body)
    assert [text_of(of_choice(chunks, index)) for index in range(6)] == [choice["text"] for choice in alone]


def test_a_prompt_counts_once_and_every_token_counts(demo_server: RunningServer) -> None:
    texts = ["Once upon a time", "There was"]
    prompt_tokens = sum(len(tokens_of(demo_server, text)) for text in texts)
    body = run_on(texts, 10, n=4, stream_options={"include_usage": True}, stream=True)
    usage = stream_events(demo_server, COMPLETIONS, body)[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 80)
    assert usage["total_tokens"] == prompt_tokens + 80
    long = random_tokens(100, 50)
    cold = post(demo_server, run_on(long, 2, n=3))["usage"]
    assert (cold["prompt_tokens"], cold["completion_tokens"]) == (100, 6)
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert post(demo_server, run_on(long, 2, n=3))["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_without_a_seed_choices_differ_and_greedy_ones_do_not(demo_server: RunningServer) -> None:
    body = run_on(random_tokens(40, 3), 24, n=4, frequency_penalty=2)
    assert len({choice["text"] for choice in post(demo_server, body | {"temperature": 2.0})["choices"]}) == 4
    assert len({choice["text"] for choice in post(demo_server, body)["choices"]}) == 1


def mean(choice: dict[str, Any]) -> float:
    logprobs = choice["logprobs"]["token_logprobs"]
    return sum(logprobs) / len(logprobs)


@pytest.mark.parametrize("n", [1, 2])
def test_best_of_returns_the_answers_that_the_model_thinks_likeliest(demo_server: RunningServer, n: int) -> None:
    prompts = [random_tokens(40, 4), tokens_of(demo_server, "Who are you? I am")]
    options: dict[str, Any] = DIVERSE
    expected = []
    for prompt in prompts:
        alone = [
            post(demo_server, run_on(prompt, 10, seed=seed, logprobs=0, **options))["choices"][0]
            for seed in range(20, 25)
        ]
        assert len({choice["text"] for choice in alone}) == 5
        expected += sorted(alone, key=mean, reverse=True)[:n]
    body = run_on(prompts, 10, seed=20, best_of=5, n=n, **options)
    answer = post(demo_server, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n))
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in expected]
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "the request did not ask for them"
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 10, "the others were generated too"
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    shown = post(demo_server, body | {"logprobs": 2})["choices"]
    assert [choice["text"] for choice in shown] == [choice["text"] for choice in expected]
    assert [mean(choice) for choice in shown] == [pytest.approx(mean(choice), abs=1e-3) for choice in expected]
    assert all(len(top) >= 2 for choice in shown for top in choice["logprobs"]["top_logprobs"])


def test_best_of_may_equal_n_and_then_streams(demo_server: RunningServer) -> None:
    body = run_on("Once", 6, n=2, best_of=2, seed=1, temperature=1.0)
    texts = [choice["text"] for choice in post(demo_server, body)["choices"]]
    chunks = stream_events(demo_server, COMPLETIONS, body)
    assert [text_of(of_choice(chunks, index)) for index in range(2)] == texts


def test_an_answer_without_a_token_is_never_the_best(demo_server: RunningServer) -> None:
    """A stop string at its very beginning leaves nothing to judge an answer by."""
    prompt = random_tokens(40, 5)
    options: dict[str, Any] = {"temperature": 1.5}
    texts = [post(demo_server, run_on(prompt, 6, seed=seed, **options))["choices"][0]["text"] for seed in (1, 2, 3)]
    stop = texts[0][0]
    assert any(stop not in text for text in texts)
    best = post(demo_server, run_on(prompt, 6, seed=1, best_of=3, stop=stop, **options))["choices"][0]
    assert best["text"]


def test_later_choices_are_forks_of_the_first(one_at_a_time: RunningServer) -> None:
    server = one_at_a_time
    with StepGate(server) as gate:
        pending = start(server, run_on("Once", 3, n=3, service_tier="flex"), "mine")
        gate.wait_held()  # before their first step
        requests = [running.request for running in server.core.requests.by_sequence.values()]
        assert [(r.request_id, r.fork_of) for r in requests] == [
            ("mine-0", None),
            ("mine-1", "mine-0"),
            ("mine-2", "mine-0"),
        ]
        assert len({request.arrival_time for request in requests}) == 1
        gate.open()
        assert pending.result().json()["service_tier"] == "flex"


def test_choices_share_the_blocks_of_their_prompt(demo_server: RunningServer) -> None:
    """Three whole blocks and a part of one: each choice needs a copy of that part only."""
    with StepGate(demo_server) as gate:
        pending = start(demo_server, run_on(random_tokens(100, 60), 9, n=3, temperature=1), "mine")
        gate.allow(2)
        status = within_one_step(demo_server, gate, "GET", "/v1/status").json()
        gate.open()
        assert pending.result().status_code == 200
    assert [s["request_id"] for s in status["running"]["sequences"]] == [f"mine-{i}" for i in range(3)]
    assert {(s["blocks"], s["shared_blocks"], s["max_ref_count"]) for s in status["running"]["sequences"]} == {
        (4, 3, 3)
    }
    assert status["blocks"]["used"] == 3 + 3


def test_choices_count_as_requests_against_the_queue(one_at_a_time: RunningServer) -> None:
    """Three are taken: one that runs and two that wait."""
    server = one_at_a_time
    with StepGate(server) as gate, raw(server) as client:
        pending = start(server, run_on("x", 3, n=2), "mine")
        response = client.post(COMPLETIONS, json=run_on("x", 1, n=2))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "queue_full"
        for path, body, param in (
            (COMPLETIONS, run_on("x", 1, n=4), "n"),
            (CHAT, ask("x", n=4), "n"),
            (COMPLETIONS, run_on("x", 1, n=2, best_of=4), "best_of"),
            (COMPLETIONS, run_on(["x"] * 4, 1), "prompt"),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert response.json()["error"]["code"] == "too_many_prompts"
        third = Background.post(server, COMPLETIONS, run_on("x", 1))
        wait_until(lambda: server.engine.num_unfinished == 3)
        gate.open()
        assert [request.result().status_code for request in (pending, third)] == [200, 200]
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_one_failing_choice_ends_them_all(
    one_at_a_time: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server = one_at_a_time
    advance = RunningRequest.advance

    def failing(running: RunningRequest, *token: Any) -> Any:
        if running.request.request_id == "mine-1":
            raise LookupError("no such token")
        return advance(running, *token)

    monkeypatch.setattr(RunningRequest, "advance", failing)
    pending = Background.post(server, COMPLETIONS, run_on("x", 60, n=3, stream=stream), X_Request_Id="mine")
    assert "no such token" in check_failure(pending, 500, "server_error", "generation_failed")["message"]
    server.wait_idle()
    assert list(server.app.state.server.open_requests) == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_all_its_choices_along(demo_server: RunningServer, stream: bool) -> None:
    before = demo_server.engine.stats
    with StepGate(demo_server) as gate:
        with raw_post(demo_server, COMPLETIONS, run_on(random_tokens(40, 6), 500, n=4, stream=stream)):
            wait_until(lambda: demo_server.engine.num_unfinished == 4)
            gate.allow(3)
            gate.wait_held()
        wait_until(lambda: queued_commands(demo_server) == 4)
        gate.open()
        demo_server.wait_idle()
    assert demo_server.engine.stats.generated_tokens_total - before.generated_tokens_total <= 4 * 5
    assert list(demo_server.app.state.server.open_requests) == []
