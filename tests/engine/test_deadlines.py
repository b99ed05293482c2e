"""Deadlines in the engine, by a clock of the test's own, also while a step is in flight."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.deadlines import Deadlines, set_deadlines
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence
from mlxpaged.core.step import Step
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from tests.scheduler.simulation import make_scheduler
from tests.scheduler.test_deadlines import teach
from tests.support import every, make_tiny_model, poison_new_blocks, run_requests


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
    core = build_engine(EngineConfig(kv_cache_bytes=cache, max_step_ms=0, **options), served, clock)
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
        cancelled = core.cancel([(cancel_at or {}).get(step, "unknown")])[1]
        for output in cancelled + core.expire() + (core.step() if core.has_work() else []):
            outputs.setdefault(output.request_id, []).append(output)
    assert core.scheduler.pool.usage().used == 0
    assert not core.has_work()
    assert core.status().running == core.status().waiting == ()
    return outputs


def watched(deadlines: Deadlines, number: int, request: Request) -> Sequence:
    sequence = Sequence(number, request.prompt_token_ids, 4, arrival_time=request.arrival_time)
    set_deadlines(sequence, request)
    deadlines.watch(sequence)
    return sequence


def missed(deadlines: Deadlines, now: float) -> list[int]:
    return [sequence_id for sequence_id, _ in deadlines.missed(now)]


def test_deadlines_pass_in_time_and_those_of_finished_sequences_never() -> None:
    deadlines = Deadlines(make_scheduler())
    for number, limit in enumerate((5.0, 1.0, 3.0, 2.0, 4.0)):
        watched(deadlines, number, request("x", [1], arrival=10.0, timeout=limit))
    watched(deadlines, 5, request("x", [1]))
    deadlines.forget(3)
    assert missed(deadlines, 10.9) == []
    assert sorted(missed(deadlines, 14.0)) == [1, 2, 4]
    assert missed(deadlines, 15.0) == [0]
    assert len(deadlines) == 0


def test_no_deadline_is_found_later_than_it_passes() -> None:
    source, deadlines = random.Random(0), Deadlines(make_scheduler())
    limits = [source.choice([0.01, 1.0, 30.0]) * source.random() for _ in range(200)]
    for number, limit in enumerate(limits):
        watched(deadlines, number, request("x", [1], timeout=limit))
    now, found = 0.0, 0
    while found < len(limits):
        now += 0.01
        for number in missed(deadlines, now):
            assert now - 0.0101 < limits[number] <= now
            found += 1


def test_a_sequence_that_ends_at_its_first_deadline_has_no_second_one() -> None:
    deadlines = Deadlines(make_scheduler())
    watched(deadlines, 1, request("x", [1], timeout=2.0, ttft_timeout=1.0))
    messages = []
    for sequence_id, message in deadlines.missed(5.0):
        messages.append(message)
        deadlines.forget(sequence_id)
    [message] = messages
    assert "timeout of" in message


def test_distant_deadlines_of_finished_sequences_do_not_pile_up() -> None:
    deadlines = Deadlines(make_scheduler())
    for number in range(10_000):
        watched(deadlines, number, request("x", [1], timeout=1e9, ttft_timeout=1e9))
        if number >= 20:
            deadlines.forget(number - 20)
        assert len(deadlines) <= 4 * 21 + 66


# -- deadlines that cannot be met ------------------------------------------------------------------------------------


def queued(prompt: int, **limits: float) -> tuple[Deadlines, Scheduler]:
    """A request that waits in a scheduler which knows that a prompt token takes 10 ms."""
    scheduler = make_scheduler(num_blocks=512, max_num_batched_tokens=256)
    teach(scheduler)
    deadlines = Deadlines(scheduler)
    scheduler.add(watched(deadlines, 1, request("x", list(range(prompt)), max_tokens=4, **limits)))
    return deadlines, scheduler


@pytest.mark.parametrize("name", ["timeout", "ttft_timeout"])
def test_a_deadline_that_cannot_be_met_is_missed_at_once_and_says_why(name: str) -> None:
    deadlines, _ = queued(1000, **{name: 2.0})
    [(number, message)] = deadlines.missed(0.0)
    assert number == 1
    assert message == f"{name} of 2 s cannot be met: the remaining 1000 prompt tokens take about 10.0 s on this machine"


def test_a_deadline_that_may_be_met_after_all_is_kept_until_that_is_clear() -> None:
    """The estimate must be twice the time left: at 10 s of 11 s and even of 6 s, the request stays."""
    deadlines, _ = queued(1000, ttft_timeout=11.0)
    assert missed(deadlines, 0.0) == []
    assert missed(deadlines, 5.5) == [], "5.5 s are left"
    [(_, message)] = deadlines.missed(9.0)
    assert "cannot be met" in message


def test_a_deadline_is_not_given_up_while_the_prompt_advances_fast_enough() -> None:
    deadlines, scheduler = queued(1000, ttft_timeout=10.5)
    sequence, now = scheduler.sequences[1], 0.0
    while sequence.num_output_tokens == 0:
        assert missed(deadlines, now) == []
        batch = scheduler.schedule()
        now += batch.num_tokens / 100
        scheduler.update(batch, {1: [5]})
    assert missed(deadlines, 100.0) == []


def test_a_deadline_is_not_given_up_early_while_too_little_is_known() -> None:
    scheduler = make_scheduler(num_blocks=512)
    deadlines = Deadlines(scheduler)
    scheduler.add(watched(deadlines, 1, request("x", [7] * 1000, ttft_timeout=0.1)))
    assert missed(deadlines, 0.09) == []
    [(_, message)] = deadlines.missed(0.1)
    assert message.startswith("ttft_timeout of 0.1 s passed: after 0.100 s the request was waiting")


def test_a_request_whose_deadline_cannot_be_met_never_runs(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    forward = ModelRunner.forward

    def timed(self: ModelRunner, batch: Step, *rest: Any) -> Any:
        clock.now += batch.num_tokens / 100
        return forward(self, batch, *rest)

    monkeypatch.setattr(ModelRunner, "forward", timed)
    core = make_core(served, clock)
    for length in range(40, 140, 10):
        core.add(request(str(length), [length] * length, clock.now, max_tokens=1))
        while core.has_work():
            core.step()
    steps = core.stats().steps_total
    core.add(request("hopeless", [5] * 400, clock.now, ttft_timeout=1.0))
    core.add(request("possible", [6] * 400, clock.now, ttft_timeout=9.0))
    [output] = core.expire()
    assert output.request_id == "hopeless"
    assert output.finish_reason is FinishReason.TIMEOUT
    assert output.error is not None
    assert output.error.startswith("ttft_timeout of 1 s cannot be met: the remaining 400 prompt tokens take about 4.")
    assert core.stats().steps_total == steps
    assert finish(core, clock)["possible"][-1].finish_reason is FinishReason.LENGTH


# -- in the engine ---------------------------------------------------------------------------------------------------


def test_only_those_whose_time_is_up_end(served: ServedModel) -> None:
    clock = Clock()
    prompts = [[5, 6, 7] * 20, [8, 9], [10] * 40, [11, 12, 13, 14]]
    expected = run_requests(make_core(served, clock), prompts, max_tokens=12)
    core = make_core(served, clock, max_num_seqs=3, max_num_batched_tokens=48)
    clock.now = 0.0
    limits = [None, 6.0, None, 6.0]
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


@pytest.mark.parametrize("seed", every(3, range(6)))
def test_requests_that_end_early_do_not_change_other_answers(served: ServedModel, seed: int) -> None:
    """Deadlines and cancellations at random times, in a pool that is too small for all."""
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
