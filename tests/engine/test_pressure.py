"""A pool that is too small: blocks are swapped out and in, copied before a write, and every answer stays the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.swap_space import SwapSpace
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.scheduling.stats import SchedulerStats
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from tests.support import make_tiny_model, poison_new_blocks, run_requests

PROMPTS = [[(7 * i + k) % 250 for k in range(20 + 9 * i)] for i in range(10)]
TOKENS = 30


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", head_dim=32)))


@pytest.fixture(scope="module")
def undisturbed(served: ServedModel) -> list[list[int]]:
    core = make_core(served, blocks=100)
    answers = [run_requests(core, [prompt], max_tokens=TOKENS)[0] for prompt in PROMPTS]
    assert core.stats().scheduler.preemptions_total == 0
    return answers


def make_core(served: ServedModel, blocks: int, swap_blocks: int = 0, **options: Any) -> EngineCore:
    block = 32 * bytes_per_token(served.layers)
    config = {"kv_cache_bytes": blocks * block, "swap_space_bytes": swap_blocks * block, "prefix_caching": False}
    core = build_engine(EngineConfig(**(config | {"max_step_ms": 0} | options)), served)
    poison_new_blocks(core)
    return core


def check_balanced(core: EngineCore) -> SchedulerStats:
    stats = core.stats().scheduler
    assert stats.blocks.used == 0
    assert stats.blocks.used + stats.blocks.cached + stats.blocks.free == core.scheduler.pool.num_blocks
    assert stats.swap.used == 0
    return stats


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.rotated("models")
def test_a_swapped_answer_equals_the_undisturbed_one(
    served: ServedModel,
    undisturbed: list[list[int]],
    overlaps: bool,
    in_file: bool,
    prefix_caching: bool,
    tmp_path: Path,
) -> None:
    place = {"swap_dir": tmp_path} if in_file else {}
    core = make_core(served, blocks=9, swap_blocks=40, prefix_caching=prefix_caching, **place)
    assert run_requests(core, PROMPTS, max_tokens=TOKENS) == undisturbed
    stats = check_balanced(core)
    assert stats.preemptions_total > 0
    assert stats.blocks_swapped_out_total > 0
    assert (stats.blocks_swapped_in_total == stats.blocks_swapped_out_total) or prefix_caching
    core.close()


@pytest.mark.parametrize("swap_blocks", [0, 3])
@pytest.mark.rotated("models")
def test_without_room_in_swap_space_values_are_computed_again(
    served: ServedModel, undisturbed: list[list[int]], overlaps: bool, swap_blocks: int
) -> None:
    core = make_core(served, blocks=9, swap_blocks=swap_blocks)
    computed = tokens_computed(core)
    assert run_requests(core, PROMPTS, max_tokens=TOKENS) == undisturbed
    stats = check_balanced(core)
    assert stats.preemptions_total > 0
    assert (stats.blocks_swapped_out_total > 0) == (swap_blocks > 0)
    assert sum(computed) > sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1)


def test_what_was_swapped_is_not_computed_again(served: ServedModel) -> None:
    core = make_core(served, blocks=9, swap_blocks=40)
    computed = tokens_computed(core)
    run_requests(core, PROMPTS, max_tokens=TOKENS)
    assert core.stats().scheduler.preemptions_total > 0
    assert sum(computed) == sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1)


def tokens_computed(core: EngineCore) -> list[int]:
    forward, counts = core.runner.forward, []

    def counting(batch: Any, *rest: Any) -> Any:
        counts.append(batch.num_tokens)
        return forward(batch, *rest)

    core.runner.forward = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("failing", ["store", "load"])
@pytest.mark.rotated("models")
def test_a_swap_that_fails_costs_time_and_no_answer(
    served: ServedModel,
    undisturbed: list[list[int]],
    overlaps: bool,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    original, calls = getattr(SwapSpace, failing), []

    def sometimes(self: SwapSpace, pairs: Any) -> None:
        if pairs:
            calls.append(pairs)
            if len(calls) % 2:
                raise OSError("the disk is gone")
        original(self, pairs)

    monkeypatch.setattr(SwapSpace, failing, sometimes)
    core = make_core(served, blocks=9, swap_blocks=40)
    assert run_requests(core, PROMPTS, max_tokens=TOKENS) == undisturbed
    check_balanced(core)
    assert "the disk is gone" in caplog.text


def test_pools_that_are_lost_with_a_failed_swap_are_not_read_again(
    served: ServedModel, undisturbed: list[list[int]], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running ones need nothing of what was moved, and all that they have computed is gone nevertheless."""
    core = make_core(served, blocks=9, swap_blocks=40, prefix_caching=True)
    store, finish_step, lost = SwapSpace.store, core.runner.finish_step, []

    def failing(self: SwapSpace, pairs: Any) -> None:
        if pairs and not lost:
            lost.append(pairs)
            raise RuntimeError("the device is gone")
        store(self, pairs)

    def losing(*results: mx.array) -> None:
        if len(lost) == 1:
            lost.append(())
            for layer in core.runner.layers:
                layer.kv.clear()
            raise DeviceError("the device is gone")
        finish_step(*results)

    monkeypatch.setattr(SwapSpace, "store", failing)
    monkeypatch.setattr(core.runner, "finish_step", losing)
    assert run_requests(core, PROMPTS, max_tokens=TOKENS) == undisturbed
    assert len(lost) == 2
    check_balanced(core)


def test_swapped_requests_give_their_slots_back_when_they_are_aborted(served: ServedModel, overlaps: bool) -> None:
    core = make_core(served, blocks=9, swap_blocks=40)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        core.add(Request(str(i), prompt, params, time.monotonic()))
    while core.stats().scheduler.swap.used == 0:
        core.step()
    core.abort_all("enough")
    while core.has_work():
        core.step()
    check_balanced(core)


def test_forks_share_the_prompt_and_answer_as_if_they_were_alone(served: ServedModel, overlaps: bool) -> None:
    prompt = list(range(100, 145))  # one full block, and one that all four write on in
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(4)]
    expected = [
        run_requests(make_core(served, 50), [prompt], temperature=1.0, seed=s, max_tokens=40)[0] for s in range(4)
    ]
    assert len({tuple(answer) for answer in expected}) == 4
    core = make_core(served, blocks=50)
    for i in range(4):
        core.add(Request(str(i), prompt, params[i], time.monotonic(), fork_of=None if i == 0 else "0"))
    answers: dict[str, list[int]] = {str(i): [] for i in range(4)}
    shared = 0
    while core.has_work():
        for output in core.step():
            answers[output.request_id] += output.token_ids
            if output.finish_reason is not None and output.request_id != "0":
                assert output.num_cached_tokens == len(prompt) - 1
        pool = core.scheduler.pool
        shared = max(shared, *(pool.ref_count(block) for block in range(pool.num_blocks)))
    assert [answers[str(i)] for i in range(4)] == expected
    assert shared == 4
    assert check_balanced(core).blocks_copied_total == 3, "the last owner of the block writes in place"


def test_a_high_priority_request_takes_the_place_of_a_low_one_and_both_answers_are_right(
    served: ServedModel, undisturbed: list[list[int]], overlaps: bool
) -> None:
    core = make_core(served, blocks=9, swap_blocks=40, max_num_seqs=1)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    ends: list[str] = []
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            ends.extend([output.request_id] if output.finish_reason is not None else [])

    core.add(Request("low", PROMPTS[0], params, time.monotonic(), Priority.LOW))
    for _ in range(5):
        step()
    core.add(Request("high", PROMPTS[1], params, time.monotonic(), Priority.HIGH))
    while core.has_work():
        step()
    assert ends == ["high", "low"]
    assert [answers["low"], answers["high"]] == undisturbed[:2]
    assert check_balanced(core).blocks_swapped_in_total > 0


def test_the_kernels_move_blocks_as_well(served: ServedModel, undisturbed: list[list[int]], metal: None) -> None:
    core = make_core(served, blocks=7, swap_blocks=40, attention_backend="metal")
    prompts, expected = PROMPTS[:5], undisturbed[:5]
    assert run_requests(core, prompts, max_tokens=TOKENS) == expected
    stats = check_balanced(core)
    assert stats.blocks_swapped_in_total > 0


@pytest.mark.parametrize("preference", [0.1, 0.9])
@pytest.mark.rotated("models")
def test_answers_do_not_depend_on_what_is_kept_for_decoding(
    served: ServedModel, undisturbed: list[list[int]], overlaps: bool, preference: float
) -> None:
    core = make_core(served, 100, max_num_batched_tokens=64, decode_preference=preference, prefix_caching=True)
    assert run_requests(core, PROMPTS, max_tokens=TOKENS) == undisturbed
