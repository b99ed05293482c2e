"""Failures of steps: on the host, on the device, and logits that are not finite."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep, StepResult
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason, Priority
from mlxpaged.core.step import Step
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.memory import step_limit
from tests.attention.scenes import fill_blocks
from tests.engine.llama import PROMPTS, core, make_core, run, served, submit, tokens
from tests.support import run_requests

__all__ = ["core", "served"]


pytestmark = pytest.mark.usefixtures("overlaps")


POISONED_TOKEN = 77


def fail_when(core: EngineCore, condition: Callable[[Step], bool]) -> list[Step]:
    """Let the forward pass of some batches raise, after half the work is done. Returns the batches that were tried."""
    forward, tried = core.runner.forward, []

    def failing(batch: Step, *args: Any) -> mx.array:
        tried.append(batch)
        logits = forward(batch, *args)
        if condition(batch):
            raise RuntimeError("injected")
        return logits

    core.runner.forward = failing  # type: ignore[method-assign]
    return tried


def holds_poisoned_token(core: EngineCore, batch: Step) -> bool:
    sequences = [core.scheduler.sequences[row.sequence_id] for row in batch.rows]
    return any(POISONED_TOKEN in each.token_ids[: each.num_prompt_tokens] for each in sequences)


def test_a_failing_request_ends_with_its_error_and_its_neighbours_never_notice(
    core: EngineCore, served: ServedModel
) -> None:
    expected = run_requests(make_core(served), PROMPTS, max_tokens=12)
    fail_when(core, partial(holds_poisoned_token, core))
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt)
    submit(core, "culprit", [20, POISONED_TOKEN, 21])
    outputs = run(core)
    [last] = outputs["culprit"]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the step failed: RuntimeError: injected"
    assert [tokens(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
    assert core.scheduler.pool.usage().used == 0
    submit(core, "next", PROMPTS[0])
    assert tokens(run(core)["next"]) == expected[0]


def test_the_stack_of_a_failure_is_logged_once(core: EngineCore, caplog: pytest.LogCaptureFixture) -> None:
    """The failed step is repeated in halves, and each of them that has the culprit fails too."""
    poisoned: list[bool] = []

    def holds_culprit(batch: Step) -> bool:
        poisoned.append(holds_poisoned_token(core, batch))
        return poisoned[-1]

    fail_when(core, holds_culprit)
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt)
    submit(core, "culprit", [20, POISONED_TOKEN, 21])
    run(core)
    failed = [record for record in caplog.records if "failed" in record.getMessage()]
    assert len(failed) == sum(poisoned) > 2
    assert [record.exc_info is not None for record in failed] == [True] + [False] * (len(failed) - 1)
    assert all("injected" in record.getMessage() for record in failed[1:])


def test_a_batch_that_fails_once_loses_no_request(core: EngineCore, served: ServedModel) -> None:
    expected = run_requests(make_core(served), PROMPTS, max_tokens=12)
    tried: list[Step] = []
    tried = fail_when(core, lambda batch: len(tried) == 4)
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt)
    outputs = run(core)
    assert [tokens(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
    assert [len(batch) for batch in tried[3:6]] == [4, 2, 2], "it is run again in halves"


def test_a_request_that_shares_blocks_with_a_failing_one_computes_them_itself(
    core: EngineCore, served: ServedModel
) -> None:
    prefix = list(range(100, 170))
    [expected] = run_requests(make_core(served), [[*prefix, 30]], max_tokens=12)
    fail_when(core, partial(holds_poisoned_token, core))
    submit(core, "culprit", [*prefix, POISONED_TOKEN])
    submit(core, "dependant", [*prefix, 30])
    outputs = run(core)
    assert outputs["culprit"][-1].error
    assert tokens(outputs["dependant"]) == expected
    assert core.stats().scheduler.preemptions_total == 1


def num_output_tokens(core: EngineCore, step: InFlightStep) -> int:
    """Of the first sequence of a step."""
    return core.scheduler.sequences[step.rows[0].sequence_id].num_output_tokens


def lose_pools_when(
    monkeypatch: pytest.MonkeyPatch, condition: Callable[[InFlightStep], bool], message: str = "injected"
) -> list[InFlightStep]:
    """Let the device fail in some steps, with other contents in the pools. Returns the steps that failed."""
    read, failed = InFlightStep.read, []

    def failing(step: InFlightStep) -> StepResult:
        if condition(step):
            failed.append(step)
            raise DeviceError(message)
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", failing)
    return failed


def test_a_device_error_loses_no_request_and_nothing_stale_is_reused(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(40)), [3, 4, 5]]
    expected = run_requests(make_core(served), prompts, max_tokens=12)
    core = make_core(served)
    run_requests(core, prompts, max_tokens=12)
    assert core.scheduler.pool.usage().cached > 0
    failed: list[InFlightStep] = []
    failed = lose_pools_when(monkeypatch, lambda step: not failed and num_output_tokens(core, step) == 5)
    for i, prompt in enumerate(prompts):
        submit(core, str(i), [*prompt, 7])
    cached = []
    while not failed:
        core.step()
    cached = [sequence.num_computed_tokens for sequence in core.scheduler.waiting]
    assert cached == [0, 0]
    assert core.scheduler.pool.usage().cached == 0
    outputs = run(core)
    assert [output.error for answer in outputs.values() for output in answer if output.error] == []
    assert run_requests(core, prompts, max_tokens=12) == expected


TIMEOUT = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErro"


@pytest.mark.parametrize("most", [100, 30])
def test_a_step_that_took_the_device_too_long_is_repeated_in_smaller_chunks(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """More than two failures end no request as long as the chunks can be cut."""
    prompts = [[1 + i * 7 % 50 for i in range(400)], [3, 4, 5]]
    expected = run_requests(make_core(served), prompts, max_tokens=12)
    core = make_core(served)
    failed = lose_pools_when(monkeypatch, lambda step: step.scheduled.num_tokens > most, TIMEOUT)
    assert run_requests(core, prompts, max_tokens=12) == expected
    sizes = [step.scheduled.num_tokens for step in failed]
    assert sizes[0] > 400
    assert all(after <= before // 2 for before, after in itertools.pairwise(sizes)), "each is half of the one before"
    assert core.scheduler.max_tokens <= most, "it stays so for the next prompts"


def test_steps_are_as_long_as_before_after_many_in_time(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(served)
    before = core.scheduler.max_tokens
    lost: list[InFlightStep] = []
    lost = lose_pools_when(monkeypatch, lambda step: not lost and step.scheduled.num_tokens > 100, TIMEOUT)
    monkeypatch.setattr(step_limit, "STEPS_IN_TIME", 20)
    run_requests(core, [list(range(200))], max_tokens=8)
    assert core.scheduler.max_tokens == 100
    run_requests(core, [list(range(20))], max_tokens=25)
    assert core.scheduler.max_tokens == 200
    run_requests(core, [list(range(20))], max_tokens=120)
    assert core.scheduler.max_tokens == before


def test_after_a_failed_allocation_steps_are_half_as_long_and_grow_as_they_succeed(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(served)
    forward, tried, returned, limits = core.runner.forward, list[int](), list[int](), [core.scheduler.max_tokens]

    def failing(step: Step, *args: Any) -> mx.array:
        tried.append(step.num_tokens)
        if len(tried) == 1:
            raise MemoryError
        return forward(step, *args)

    core.runner.forward = failing  # type: ignore[method-assign]
    monkeypatch.setattr(mx, "clear_cache", lambda: returned.append(len(tried)))
    submit(core, "one", [1 + i * 7 % 50 for i in range(400)])
    while core.has_work():
        core.step()
        if core.scheduler.max_tokens != limits[-1]:
            limits.append(core.scheduler.max_tokens)
    assert tried[:2] == [400, 200]
    assert returned[0] == 1, "MLX's freed buffers are returned before the step is tried again"
    assert limits == [2048, 200, 400, 800, 1600, 2048]


def test_a_short_step_that_takes_too_long_ends_its_request(
    core: EngineCore, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = lose_pools_when(monkeypatch, lambda step: holds_poisoned_token(core, step.scheduled), TIMEOUT)
    submit(core, "culprit", [20, POISONED_TOKEN, 21])
    assert str(run(core)["culprit"][-1].error).startswith("the step failed on the device 2 times: ")
    assert len(failed) == 2


@pytest.mark.parametrize(
    ("message", "is_timeout"),
    [
        (TIMEOUT, True),
        ("Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)", True),
        ("Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", False),
        ("Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang)", False),
    ],
)
def test_metals_timeouts_are_known_by_their_messages(message: str, is_timeout: bool) -> None:
    assert DeviceError(f"RuntimeError: {message}").is_timeout == is_timeout


def test_a_request_whose_steps_keep_failing_on_the_device_ends_and_its_neighbours_do_not(
    core: EngineCore, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_requests(make_core(served), PROMPTS, max_tokens=12)
    failed = lose_pools_when(monkeypatch, lambda step: holds_poisoned_token(core, step.scheduled))
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt)
    submit(core, "culprit", [20, POISONED_TOKEN, 21])
    outputs = run(core)
    assert outputs["culprit"][-1].error == "the step failed on the device 2 times: injected"
    assert [tokens(outputs[str(i)]) for i in range(len(PROMPTS))] == expected
    assert len(failed) == 2
    assert core.scheduler.pool.usage().used == 0


def test_a_request_on_trial_after_a_device_error_does_not_end_for_the_failure_of_a_new_one(
    core: EngineCore, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = run_requests(make_core(served), [PROMPTS[0]], max_tokens=12)
    failed = lose_pools_when(monkeypatch, lambda step: holds_poisoned_token(core, step.scheduled))
    submit(core, "culprit", [20, POISONED_TOKEN, 21])
    submit(core, "sound", PROMPTS[0])
    while len(failed) < 2:
        core.step()
    submit(core, "second culprit", [20, POISONED_TOKEN, 22])
    outputs = run(core)
    assert tokens(outputs["sound"]) == expected
    assert outputs["second culprit"][-1].error == "the step failed on the device 2 times: injected"


def test_a_block_that_a_failed_step_left_incomplete_is_not_reused_after_its_answer_ended(
    core: EngineCore, served: ServedModel
) -> None:
    """The token that ends the answer is the last one of its block, and the step that computes it cannot be launched."""
    prompt = list(range(100, 127))
    params = {"temperature": 1.0, "seed": 1}
    [free] = run_requests(make_core(served), [prompt], max_tokens=8, **params)
    assert free.index(free[4]) == 4
    [expected] = run_requests(make_core(served), [[*prompt, *free[:5], 7]], max_tokens=12)
    forward = core.runner.forward

    def failing(batch: Step, *args: Any) -> mx.array:
        if any(row.start == 31 for row in batch.rows):
            raise RuntimeError("injected")
        return forward(batch, *args)

    core.runner.forward = failing  # type: ignore[method-assign]
    submit(core, "first turn", prompt, stop_token_ids=frozenset({free[4]}), **params)
    assert tokens(run(core)["first turn"]) == free[:5]
    core.runner.forward = forward  # type: ignore[method-assign]
    submit(core, "second turn", [*prompt, *free[:5], 7])
    assert tokens(run(core)["second turn"]) == expected


def test_what_a_failure_makes_the_engine_recompute_counts_as_prefill(
    served: ServedModel, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    core = build_engine(EngineConfig(kv_cache_bytes=1_000_000), served, lambda: now[0])
    failed: list[InFlightStep] = []
    failed = lose_pools_when(monkeypatch, lambda step: not failed and num_output_tokens(core, step) == 5)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    core.add(Request("first", PROMPTS[0], params, 0.0, timeline=True))
    prefills = []
    while core.has_work():
        now[0] += 1
        for output in core.step():
            if output.timeline is not None:
                prefills.append(output.timeline.prefill_seconds)
                assert output.timeline.preemptions == 1
    assert prefills == [2.0 if overlaps else 0.0]  # a step on its own begins and ends at the same time of this clock


def test_an_error_while_the_pools_are_rebuilt_is_the_end_of_the_engine(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_pools_when(monkeypatch, lambda step: True)

    def failing(*arrays: Any) -> None:
        raise RuntimeError("the device is gone")

    submit(core, "first", PROMPTS[0])
    core.step()
    monkeypatch.setattr(mx, "eval", failing)
    with pytest.raises(DeviceError, match="the device is gone"):
        run(core)


def test_logits_that_are_not_finite_fail_their_request_instead_of_choosing_a_token(
    core: EngineCore, served: ServedModel
) -> None:
    [expected] = run_requests(make_core(served), [PROMPTS[0]], max_tokens=12)
    forward = core.runner.forward

    def spoiling(batch: Step, *args: Any) -> mx.array:
        spoiled = [[holds_poisoned_token(core, Step((row,)))] for row in batch.rows if row.samples]
        return mx.where(mx.array(spoiled), mx.nan, forward(batch, *args))

    core.runner.forward = spoiling  # type: ignore[method-assign]
    submit(core, "sound", PROMPTS[0])
    submit(core, "spoiled", [20, POISONED_TOKEN, 21])
    outputs = run(core)
    assert outputs["spoiled"][-1].error == "the model's logits are not finite"
    assert tokens(outputs["sound"]) == expected


def test_what_was_swapped_out_of_a_step_with_infinite_logits_is_recomputed(served: ServedModel, overlaps: bool) -> None:
    """It shares blocks that are not finite, and has left the pool before the step is read."""
    prefix = list(range(100, 164))
    prompt = [*prefix, *range(150)]
    [expected] = run_requests(make_core(served), [prompt], max_tokens=5)
    block = 32 * bytes_per_token(served.layers)
    core = make_core(served, kv_cache_bytes=16 * block, swap_space_bytes=16 * block, max_num_batched_tokens=200)
    submit(core, "spoiled", [*prefix, 1, 2, 3])
    submit(core, "sharer", prompt, max_tokens=5)
    forward, calls = core.runner.forward, []

    def spoiling(batch: Step, *args: Any) -> mx.array:
        logits = forward(batch, *args)
        calls.append(batch)
        if len(calls) > 1:
            return logits
        table = core.scheduler.sequences[batch.rows[0].sequence_id].kv.table
        assert table is not None
        for layer in core.runner.layers:
            fill_blocks(layer.kv, table.block_ids)
        return logits * mx.nan

    core.runner.forward = spoiling  # type: ignore[method-assign]
    outputs = {output.request_id: [output] for output in core.step()}
    urgent = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    core.add(Request("urgent", [9] * 266, urgent, time.monotonic(), priority=Priority.HIGH))
    for name, more in run(core).items():
        outputs.setdefault(name, []).extend(more)
    assert outputs["spoiled"][-1].error == "the model's logits are not finite"
    assert tokens(outputs["sharer"]) == expected
    assert (core.stats().scheduler.blocks_swapped_out_total > 0) == overlaps


def observed(core: EngineCore) -> list[tuple[int, float]]:
    """Tokens and seconds of every step that the cost model learns from, from here on."""
    found: list[tuple[int, float]] = []
    observe = core.scheduler.times.observe

    def noting(batch: Step, seconds: float) -> None:
        found.append((batch.num_tokens, seconds))
        observe(batch, seconds)

    core.scheduler.times.observe = noting  # type: ignore[method-assign]
    return found


def test_of_a_step_that_is_run_again_in_halves_each_is_learned_with_its_own_time(core: EngineCore) -> None:
    found = observed(core)
    tried: list[Step] = []
    tried = fail_when(core, lambda batch: len(tried) == 1)
    for i in range(4):
        submit(core, str(i), [i, *range(20, 29)])
    outputs = run(core)
    assert all(len(tokens(outputs[str(i)])) == 12 for i in range(4)), "it failed for once"
    assert sum(count for count, _ in found) == 4 * (10 + 11)
    assert found[0][0] < 40


def test_a_step_that_failed_on_the_device_is_not_learned(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    found = observed(core)
    failed: list[InFlightStep] = []
    failed = lose_pools_when(monkeypatch, lambda step: not failed)
    submit(core, "first", list(range(40)))
    run(core)
    assert sum(count for count, _ in found) == 40 + 11
