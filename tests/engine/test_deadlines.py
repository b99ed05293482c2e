"""Deadlines in the engine, by a clock of the test's own, also while a step is under way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxpaged.engine import EngineConfig, EngineCore, Request, RequestOutput, SamplingParams, build_engine
from mlxpaged.engine.deadlines import Deadlines
from mlxpaged.engine.model_runner import ModelRunner
from mlxpaged.models import ServedModel, load_model
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.scheduler import FinishReason
from tests.support import make_tiny_model, poison_new_blocks, run_requests


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")))


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"], autouse=True)
def _overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", request.param)


def make_core(served: ServedModel, clock: Clock, blocks: int = 100, **options: Any) -> EngineCore:
    cache = blocks * 32 * bytes_per_token(served.layers)
    core = build_engine(EngineConfig(kv_cache_bytes=cache, **options), served, clock)
    poison_new_blocks(core)
    return core


def request(name: str, prompt: list[int], arrival: float = 0.0, max_tokens: int = 12, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, arrival, **fields)


def finish(core: EngineCore, clock: Clock, cancel_at: dict[int, str] | None = None) -> dict[str, list[RequestOutput]]:
    """All outputs; a step takes a second."""
    outputs: dict[str, list[RequestOutput]] = {}
    step = 0
    while core.has_work():
        step += 1
        clock.now += 1
        cancelled = core.cancel([(cancel_at or {}).get(step, "nobody")])[1]
        for output in cancelled + core.expire() + (core.step() if core.has_work() else []):
            outputs.setdefault(output.request_id, []).append(output)
    assert core.scheduler.pool.usage().used == 0
    assert not core.requests
    return outputs


def test_deadlines_pass_in_order_and_those_of_finished_sequences_never() -> None:
    deadlines = Deadlines()
    for number, limit in enumerate((5.0, 1.0, 3.0, 2.0, 4.0)):
        deadlines.watch(number, request("x", [1], arrival=10.0, timeout=limit))
    deadlines.watch(5, request("x", [1]))
    deadlines.forget(3)
    assert list(deadlines.pop_passed(10.9)) == []
    assert [deadline.sequence_id for deadline in deadlines.pop_passed(14.0)] == [1, 2, 4]
    assert [deadline.sequence_id for deadline in deadlines.pop_passed(15.0)] == [0]
    assert len(deadlines) == 0


def test_a_sequence_that_ends_at_its_first_deadline_has_no_second_one() -> None:
    deadlines = Deadlines()
    deadlines.watch(1, request("x", [1], timeout=2.0, ttft_timeout=1.0))
    passed = []
    for deadline in deadlines.pop_passed(5.0):
        passed.append(deadline.of_first_token)
        deadlines.forget(1)
    assert passed == [True]


def test_distant_deadlines_of_finished_sequences_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.watch(number, request("x", [1], timeout=1e9, ttft_timeout=1e9))
        if number >= 20:
            deadlines.forget(number - 20)
        assert len(deadlines) <= 4 * 21 + 66


def test_only_those_whose_time_is_up_end(served: ServedModel) -> None:
    clock = Clock()
    prompts = [[5, 6, 7] * 20, [8, 9], [10] * 40, [11, 12, 13, 14]]
    expected = run_requests(make_core(served, clock), prompts, max_tokens=12)
    core = make_core(served, clock, max_num_seqs=3, max_num_batched_tokens=48)
    clock.now = 0.0
    limits = [None, 6.0, 100.0, 3.0]
    for i, (prompt, timeout) in enumerate(zip(prompts, limits, strict=True)):
        core.add(request(str(i), prompt, timeout=timeout))
    outputs = finish(core, clock)
    reasons = [outputs[str(i)][-1].finish_reason for i in range(4)]
    assert reasons == [FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.LENGTH, FinishReason.TIMEOUT]
    for i in (0, 2):
        assert [token for output in outputs[str(i)] for token in output.token_ids] == expected[i]
    [never_ran] = outputs["3"]
    assert never_ran.num_output_tokens == 0
    assert never_ran.error is not None
    assert "waiting" in never_ran.error


@pytest.mark.parametrize("seed", range(6))
def test_whoever_ends_early_leaves_the_others_answers_alone(served: ServedModel, seed: int) -> None:
    """Deadlines and cancellations at random times, in a pool that makes some give way."""
    source, clock = random.Random(seed), Clock()
    prompts = [[source.randrange(16, 200) for _ in range(source.randrange(1, 70))] for _ in range(10)]
    expected = run_requests(make_core(served, clock), prompts, max_tokens=30)
    core = make_core(served, clock, blocks=4, max_num_seqs=4, max_num_batched_tokens=48)
    clock.now = 0.0
    for i, prompt in enumerate(prompts):
        limits = {name: source.choice([None, None, source.uniform(1, 120)]) for name in ("timeout", "ttft_timeout")}
        core.add(request(str(i), prompt, max_tokens=30, timeline=True, **limits))
    cancel_at = {source.randrange(1, 100): str(source.randrange(10)) for _ in range(4)}
    outputs = finish(core, clock, cancel_at)
    assert len(outputs) == 10
    assert core.stats().scheduler.preemptions_total > 0
    for i in range(10):
        got = outputs[str(i)]
        assert [output.finish_reason is not None for output in got] == [False] * (len(got) - 1) + [True]
        tokens = [token for output in got for token in output.token_ids]
        assert tokens == expected[i][: len(tokens)]
        if got[-1].finish_reason is FinishReason.LENGTH:
            assert len(tokens) == 30
        timeline = got[-1].timeline
        assert timeline is not None
        phases = (
            timeline.queued_seconds,
            timeline.prefill_seconds,
            timeline.decode_seconds,
            timeline.preempted_seconds,
        )
        assert sum(phases) == pytest.approx(timeline.total_seconds)
        if got[-1].num_output_tokens:
            assert timeline.cached_tokens + sum(timeline.prompt_chunks) == len(prompts[i])
