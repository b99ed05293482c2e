"""Faults that users of other servers reported, each played here as it happened there. docs/reliability.md has a table
of them. Each test has the name of its thread."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from mlxpaged.cli import http_server, main, serve
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import Samples, SamplingRow
from mlxpaged.core.engine.worker import Worker
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.core.scheduling.sequence import Priority
from tests.api.helpers import (
    Background,
    StepGate,
    answer_text,
    ask,
    post,
    queued_commands,
    random_tokens,
    raw,
    run_on,
    side_by_side,
    stream_together,
)
from tests.engine.hybrid import Hybrid, TinyModel, request, run
from tests.models.architectures import VOCAB_SIZE, make_architecture
from tests.support import RunningServer, poison_new_blocks, wait_until

COMPLETIONS = "/v1/completions"
WINDOW = 8
NUM_TOKENS = 6


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Layers with a window, and layers without."""
    path: Path = tmp_path_factory.mktemp("models") / "sliding"
    return TinyModel(make_architecture(path, "gemma3_text", sliding_window=WINDOW))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """Layers with a recurrent state, and layers with keys."""
    return Hybrid(tmp_path_factory.mktemp("models") / "hybrid", num_layers=2)


@contextlib.contextmanager
def raising(
    server: RunningServer, error: Exception, times: int, marked: int, rows: int = 1
) -> Iterator[list[Exception]]:
    """So many forward passes with a prompt that has this first token raise. The first one has so many rows. Yields the
    errors."""
    runner = server.core.runner
    forward, sequences, raised = runner.forward, server.core.scheduler.sequences, []

    def failing(batch: Any, *rest: Any) -> Any:
        is_marked = any(sequences[row.sequence_id].token_ids[0] == marked for row in batch.rows)
        if is_marked and len(raised) < times and (raised or len(batch.rows) >= rows):
            raised.append(error)
            raise error
        return forward(batch, *rest)

    runner.forward = failing  # type: ignore[method-assign]
    try:
        yield raised
    finally:
        runner.forward = forward  # type: ignore[method-assign]


def in_one_batch(server: RunningServer, *bodies: dict[str, Any]) -> list[Background]:
    """Requests that run together: the first step ends when all of them are queued."""
    with StepGate(server):
        paths = ["/v1/chat/completions" if "messages" in body else COMPLETIONS for body in bodies]
        pending = [Background.post(server, path, body) for path, body in zip(paths, bodies, strict=True)]
        wait_until(lambda: server.engine.num_unfinished == len(bodies))
    return pending


def is_healthy(server: RunningServer) -> bool:
    with raw(server) as client:
        return client.get("/health").status_code == 200


# -- zombies -----------------------------------------------------------------------------------------------------------

ERRORS = (
    TypeError("'NoneType' object is not iterable"),
    ValueError("Slice indices must be 32-bit integers"),
    ValueError("[broadcast_shapes] Shapes (1,1,1,0) and (1,8,1,64) cannot be broadcast."),
)


@pytest.mark.parametrize("error", ERRORS, ids=["type", "slice", "broadcast"])
def test_mlx_lm_1505_an_exception_in_a_step_leaves_no_zombie(demo_server: RunningServer, error: Exception) -> None:
    neighbour = run_on(random_tokens(20, 1), 8)
    expected = answer_text(demo_server, neighbour)
    marked = [30, *random_tokens(20, 2)]
    with raising(demo_server, error, 100, 30, rows=2) as raised:
        pending, beside = in_one_batch(demo_server, run_on(marked, 8), neighbour)
        failed, text = pending.result(), beside.text
    assert raised
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "generation_failed")
    assert text == expected
    assert is_healthy(demo_server)
    assert answer_text(demo_server, run_on(marked, 8)), "the next request is answered"
    demo_server.wait_idle()


def test_mlx_lm_1672_an_allocation_that_fails_while_answers_run_loses_none(demo_server: RunningServer) -> None:
    """It fails for four rows, for two, and for one: memory is short, and no row is the cause."""
    bodies = [run_on([31, *random_tokens(10 + i, i)], 12, stream=True) for i in range(4)]
    expected = [answer_text(demo_server, body | {"stream": False}) for body in bodies]
    error = RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")
    with raising(demo_server, error, 3, 31, rows=4) as raised:
        assert [each.text for each in in_one_batch(demo_server, *bodies)] == expected
    assert len(raised) == 3
    assert is_healthy(demo_server)
    demo_server.wait_idle()


def test_mlx_lm_1909_an_exception_where_an_answer_ends_reaches_its_client(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it was the copy of the KV cache at the end of an answer. Here nothing is copied: the text is completed."""
    advance = RunningRequest.advance

    def failing(running: RunningRequest, *token: Any) -> Any:
        output = advance(running, *token)
        if running.request.params.max_tokens == 7 and output.finish_reason is not None:
            raise RuntimeError("[metal::malloc] Unable to allocate")
        return output

    monkeypatch.setattr(RunningRequest, "advance", failing)
    with raw(demo_server) as client:
        failed, neighbour = side_by_side(
            lambda: client.post(COMPLETIONS, json=run_on("x", 7)), lambda: answer_text(demo_server, run_on("y", 9))
        )
        assert failed.status_code == 503
        assert neighbour
        assert client.post(COMPLETIONS, json=run_on("x", 3)).status_code == 200
    demo_server.wait_idle()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_mlx_lm_1390_many_prompts_leave_the_cache_within_its_pool(sliding: TinyModel) -> None:
    core = sliding.engine(num_blocks=40)
    cache = core.scheduler.prefix_cache
    assert cache is not None
    memory = 0
    for number in range(40):  # eight times what the pool holds
        run(core, [request(str(number), prompt(60, number), 2)])
        assert core.scheduler.pool.usage().used == 0
        assert len(cache) <= 40
        if number == 15:
            memory = mx.get_active_memory()
    assert mx.get_active_memory() <= memory + 100_000


def test_mlx_lm_883_a_context_beyond_the_memory_is_refused_with_both_numbers(
    demo_server: RunningServer, sliding: TinyModel
) -> None:
    """There, memory grew with the context until the kernel panicked. Here a pool limits it, and the model's length."""
    core = sliding.engine(num_blocks=24)
    with pytest.raises(PromptTooLongError, match=r"for 307 tokens .*; the pool holds \d+ tokens \(24 blocks\)"):
        core.add(request("it", prompt(300, 1), 8))
    assert not core.has_work()
    info, before = demo_server.engine.info, mx.get_active_memory()
    assert info is not None
    with raw(demo_server) as client:
        response = client.post(COMPLETIONS, json=run_on([20] * 20_000, 8))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"has 20000 tokens; this model's context length is {info.longest} tokens" in message
    assert mx.get_active_memory() <= before + 100_000
    assert is_healthy(demo_server)


def test_vllm_mlx_442_memory_is_flat_over_many_requests(demo_server: RunningServer) -> None:
    def some() -> int:
        for i in range(4):
            stream_together(demo_server, [run_on(random_tokens(5 + 9 * j, 4 * i + j), 4) for j in range(4)])
        demo_server.wait_idle()
        return mx.get_active_memory()

    some()
    first = some()
    some()
    wait_until(lambda: mx.get_active_memory() <= first + 100_000)  # the last step may not have freed its arrays yet


def test_omlx_947_what_does_not_fit_together_waits(sliding: TinyModel) -> None:
    """There, the server crashed when the KV of its requests did not fit."""
    prompts = [prompt(50, i) for i in range(6)]
    core = sliding.engine(num_blocks=24)
    result = run(core, [request(str(i), each, NUM_TOKENS) for i, each in enumerate(prompts)])
    for i, each in enumerate(prompts):
        assert result.error(str(i)) is None
        assert sliding.answer(each, NUM_TOKENS).equals(result.tokens(str(i)))


# -- answers of others -------------------------------------------------------------------------------------------------


def test_vllm_mlx_384_prompts_that_part_inside_a_block_do_not_get_each_others_answers(sliding: TinyModel) -> None:
    """There, a cached prompt was cut back to what the next prompt shares with it, and the rest stayed visible."""
    shared = prompt(31, 1)  # four blocks but for a token
    prompts = [shared[:length] + prompt(13, 10 + i) for i, length in enumerate((31, 31, 29, 28, 25, 24, 23, 9))]
    core = sliding.engine()
    poison_new_blocks(core)
    for i, each in enumerate(prompts):
        tokens = run(core, [request(str(i), each, NUM_TOKENS)]).tokens(str(i))
        assert sliding.answer(each, NUM_TOKENS).equals(tokens), f"prompt {i}"


def test_mlx_lm_965_sixteen_concurrent_prompts_keep_their_own_answers(demo_server: RunningServer) -> None:
    bodies = [run_on(f"{i} + {i * 7 % 10} is", 6, stream=True) for i in range(16)]
    together = [each.text for each in in_one_batch(demo_server, *bodies)]
    assert together == [answer_text(demo_server, body | {"stream": False}) for body in bodies]


def test_omlx_3476_a_greedy_answer_does_not_depend_on_the_others(hybrid: Hybrid) -> None:
    """Another one arrives later, is before it in the batch, and ends first."""
    each = prompt(20, 3)
    core = hybrid.engine()

    def arrive(step: int) -> None:
        if step == 3:
            core.add(request("urgent", prompt(9, 9), 4, priority=Priority.HIGH))

    for others in (0, 1, 5):
        requests = [request("it", each, 12), *(request(f"other {i}", prompt(3 + 8 * i, i), 12) for i in range(others))]
        assert hybrid.answer(each, 12).equals(run(core, requests, arrive).tokens("it")), f"{others} others"


def test_mlx_lm_1776_two_models_on_one_server_do_not_spoil_each_others_cache(
    sliding: TinyModel, hybrid: Hybrid
) -> None:
    """Their engines take turns. The second round finds the prompts of the first one cached."""
    cores = {model: model.engine() for model in (sliding, hybrid)}
    for turn in range(2):
        for model, core in cores.items():
            for seed in range(2):
                each = prompt(40, seed)
                result = run(core, [request("it", each, NUM_TOKENS)])
                assert model.answer(each, NUM_TOKENS).equals(result.tokens("it")), f"turn {turn}, prompt {seed}"


# -- windows and states ------------------------------------------------------------------------------------------------


def test_mlx_lm_983_a_short_and_a_long_prompt_run_together_on_a_sliding_model(sliding: TinyModel) -> None:
    prompts = [prompt(length, length) for length in (2, 60, WINDOW, WINDOW + 1, 33)]
    result = run(sliding.engine(), [request(str(i), each, NUM_TOKENS) for i, each in enumerate(prompts)])
    for i, each in enumerate(prompts):
        assert sliding.answer(each, NUM_TOKENS).equals(result.tokens(str(i))), f"prompt {i}"


def test_mlx_lm_1255_retries_and_short_probes_do_not_wedge_a_sliding_model(sliding: TinyModel) -> None:
    """Clients give up in the middle of their prompts and ask the same again, while others ask for a token or two."""
    core = sliding.engine(num_blocks=60, max_num_batched_tokens=16)
    long = [prompt(50, i) for i in range(3)]
    tokens: dict[str, list[int]] = {}
    for attempt in range(4):
        for i, each in enumerate(long):
            core.add(request(f"{i} {attempt}", each, NUM_TOKENS))
        core.add(request(f"probe {attempt}", prompt(3, attempt), 2))
        for _ in range(5):
            for output in core.step():
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if attempt < 3:
            for i in range(3):
                core.abort(f"{i} {attempt}")
    while core.has_work():
        for output in core.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    for i, each in enumerate(long):
        assert sliding.answer(each, NUM_TOKENS).equals(tokens[f"{i} 3"])
    for attempt in range(4):
        assert sliding.answer(prompt(3, attempt), 2).equals(tokens[f"probe {attempt}"])
    assert core.scheduler.pool.usage().used == 0


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_mlx_lm_980_a_repeated_prompt_is_not_computed_again(kind: str, request: pytest.FixtureRequest) -> None:
    model: TinyModel = request.getfixturevalue(kind)
    core, long = model.engine(), prompt(100, 5)
    computed = [repeated(model, core, long) for _ in range(2)]
    assert computed[0] >= 100
    assert computed[1] <= 2 * model.block_size + NUM_TOKENS


def repeated(model: TinyModel, core: Worker, each: list[int]) -> int:
    result = run(core, [request("it", each, NUM_TOKENS)])
    assert model.answer(each, NUM_TOKENS).equals(result.tokens("it"))
    return result.num_computed()


def test_lm_studio_1977_a_turn_computes_only_what_is_new(demo_server: RunningServer) -> None:
    messages: list[dict[str, str]] = []
    before = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn}: count from {turn} to nine and say what you are"})
        answer = post(demo_server, ask("", max_tokens=20) | {"messages": messages})
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before // 32 * 32
        before = usage["total_tokens"] - 1  # the last token of an answer is not computed
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert before > 3 * 32


# -- threads -----------------------------------------------------------------------------------------------------------


def test_vllm_mlx_407_requests_of_many_threads_are_computed_on_one(demo_server: RunningServer) -> None:
    forward, threads = demo_server.core.runner.forward, set()

    def noting(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return forward(*args)

    demo_server.core.runner.forward = noting  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(lambda i: answer_text(demo_server, run_on(f"question {i}", 3)), range(4)))
    finally:
        demo_server.core.runner.forward = forward  # type: ignore[method-assign]
    assert len(texts) == 4
    assert threads == {demo_server.engine.host.ident}


def test_vllm_mlx_800_a_prompt_that_is_cached_is_answered_as_before(demo_server: RunningServer) -> None:
    body = run_on(random_tokens(100, 800), 8, logprobs=1)
    first, second = post(demo_server, body), post(demo_server, body)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 96
    before, after = (answer["choices"][0] for answer in (first, second))
    assert after["text"] == before["text"]
    assert after["logprobs"]["token_logprobs"] == pytest.approx(before["logprobs"]["token_logprobs"], abs=1e-4)


# -- fields that are dropped -------------------------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "say what you are"}]
SAMPLING = {"temperature": 0.7, "top_p": 0.6}
OPTIONS = {"num_predict": 2, **SAMPLING}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 2, **SAMPLING},
    "/v1/completions": {"prompt": "say", "max_tokens": 2, **SAMPLING},
    "/v1/messages": {"model": "demo", "messages": QUESTION, "max_tokens": 2, **SAMPLING},
    "/v1/responses": {"input": "say", "max_output_tokens": 2, **SAMPLING},
    "/api/chat": {"model": "demo", "messages": QUESTION, "stream": False, "options": OPTIONS},
    "/api/generate": {"model": "demo", "prompt": "say", "stream": False, "options": OPTIONS},
}


@pytest.mark.parametrize("path", APIS)
def test_vllm_mlx_799_the_temperature_reaches_the_sampler(
    demo_server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, it was lost on the way of requests with images. All answers to one image were the same."""
    sampler, sampled = demo_server.core.sampler, set()
    sample = sampler.sample

    def noting(logits: mx.array, rows: Sequence[SamplingRow]) -> Samples:
        sampled.update((row.params.temperature, row.params.top_p) for row in rows)
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", noting)
    with raw(demo_server) as client:
        assert client.post(path, json=APIS[path]).status_code == 200
    assert sampled == {(0.7, 0.6)}


def test_mlx_lm_1007_a_schema_is_kept_beside_other_requests(demo_server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = ask("say what you are", max_tokens=40, response_format=form)
    plain = ask("say what you are", max_tokens=12)
    text, other = (each.text for each in in_one_batch(demo_server, body, plain))
    assert json.loads(text)["a"] in (1, 2)
    assert other == answer_text(demo_server, plain)


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_ollama_17183_a_form_that_cannot_be_kept_is_refused(demo_server: RunningServer, path: str) -> None:
    schema = {"type": "no such type"}
    form = {"format": schema}
    if path != "/api/chat":
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with raw(demo_server) as client:
        response = client.post(path, json={"model": "demo", "messages": QUESTION, **form})
    assert response.status_code == 400, response.text


# -- who runs when -----------------------------------------------------------------------------------------------------


def test_omlx_2031_long_prompts_leave_a_running_answer_its_token_of_each_step(sliding: TinyModel) -> None:
    core = sliding.engine(num_blocks=200, max_num_batched_tokens=32)
    core.add(request("running", prompt(5, 1), 30))
    while not any(output.token_ids for output in core.step()):
        pass
    for i in range(2):
        core.add(request(f"long {i}", prompt(150, 2 + i), 1))
    ended: set[str] = set()
    steps = tokens = 0
    while len(ended) < 2:
        outputs = core.step()
        steps += 1
        tokens += sum(len(output.token_ids) for output in outputs if output.request_id == "running")
        ended |= {output.request_id for output in outputs if output.finish_reason and output.request_id != "running"}
    assert steps >= 300 // 32
    assert tokens >= steps - 1  # of two steps in flight, one is not read yet
    core.abort("running")
    while core.has_work():
        core.step()


def test_omlx_3047_of_waiting_requests_the_more_urgent_one_runs_first(sliding: TinyModel) -> None:
    core = sliding.engine(max_num_seqs=1)
    order: list[str] = []
    core.add(request("running", prompt(5, 0), 4))
    core.step()
    core.add(request("low", prompt(5, 1), 4, priority=Priority.LOW))
    core.add(request("high", prompt(5, 2), 4, priority=Priority.HIGH))
    while core.has_work():
        order += [output.request_id for output in core.step() if output.finish_reason]
    assert order.index("high") < order.index("low")


# -- doors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "0"])
def test_mlx_lm_1695_other_machines_are_not_let_in_without_a_key(
    host: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "set_up", lambda level: None)
    monkeypatch.setattr(http_server, "run_server", lambda *_: 0)  # a server that is let run would not end
    with pytest.raises(SystemExit) as end:
        main(["serve", "none", "--host", host, "--port", "0"])
    assert end.value.code == 2
    assert "--api-keys" in capsys.readouterr().err


def test_mlx_lm_1390_clients_that_leave_their_streams_leave_nothing_behind(
    demo_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    num_tokens, before = 3000, demo_server.core.stats().generated_tokens_total
    with StepGate(demo_server) as gate:
        for seed in range(3):
            gate.allow(20)
            with raw(demo_server) as client, contextlib.suppress(httpx.HTTPError):
                body = run_on(random_tokens(20, seed), num_tokens, stream=True)
                with client.stream("POST", COMPLETIONS, json=body) as response:
                    next(response.iter_lines())
            wait_until(lambda: queued_commands(demo_server) or not demo_server.engine.num_unfinished)
    demo_server.wait_idle()
    assert demo_server.core.stats().generated_tokens_total - before < num_tokens
    assert is_healthy(demo_server)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
