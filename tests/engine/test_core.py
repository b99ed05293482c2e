"""The step loop: one model call a step, failures that stay with their request, text that ends where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep, StepResult
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampler import SampledToken
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model
from tests.engine.llama import PROMPTS, core, make_core, run, served, submit, tokens
from tests.support import make_tiny_model, run_requests

__all__ = ["core", "served"]

pytestmark = pytest.mark.usefixtures("overlaps")


@pytest.mark.parametrize("end", [{"max_tokens": 2}, {"stop_token_ids": frozenset({9})}])
def test_of_the_tokens_of_a_row_those_after_the_end_of_the_answer_are_dropped(
    core: EngineCore, end: dict[str, Any]
) -> None:
    submit(core, "a", [5, 6, 7], **end)
    [sequence] = core.scheduler.sequences.values()
    sequence.token_ids += [8, 9, 10]
    core.requests.advance({sequence.sequence_id: [SampledToken(token) for token in (8, 9, 10)]})
    outputs = core.requests.take_outputs()
    assert tokens(outputs) == [8, 9]
    assert [output.num_output_tokens for output in outputs] == [1, 2]
    assert [output.finish_reason is None for output in outputs] == [True, False]
    assert not core.has_work()


def test_one_step_is_one_model_call_and_one_attention_call_per_layer(core: EngineCore, overlaps: bool) -> None:
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt)
    calls = 0
    while core.has_work():
        core.step()
        calls += 1
        steps = min(calls, 12)
        stats = core.stats()
        assert stats.steps_total == stats.model_calls_total == steps
        assert stats.attention_calls_total == steps * 2
    # All prompts fit in the first step, and every later one adds a token to all of them. That an answer reaches its
    # length is known without reading it, so overlapped steps waste none; one more call reads the last one.
    assert calls == 12 + overlaps


def test_a_seeded_request_repeats_in_any_company(core: EngineCore) -> None:
    submit(core, "alone", [1, 2, 3], temperature=1.0, seed=7)
    alone = tokens(run(core)["alone"])
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt, temperature=2.0 * (i % 2))
    submit(core, "again", [1, 2, 3], temperature=1.0, seed=7)
    submit(core, "other seed", [1, 2, 3], temperature=1.0, seed=8)
    outputs = run(core)
    assert tokens(outputs["again"]) == alone
    assert tokens(outputs["other seed"]) != alone


def test_penalties_survive_a_preemption(served: ServedModel) -> None:
    prompts = [[i + 1] * 30 for i in range(3)]
    params = {"max_tokens": 40, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    expected = [run_requests(make_core(served), [prompt], **params)[0] for prompt in prompts]
    small = make_core(served, kv_cache_bytes=5 * 32 * 512)
    assert run_requests(small, prompts, **params) == expected
    assert small.stats().scheduler.preemptions_total > 0


def test_the_prefix_cache_is_seeded_with_the_model(served: ServedModel, tmp_path: Path) -> None:
    other = load_model(str(make_tiny_model(tmp_path, "llama", seed=1)))
    keys: list[list[bytes]] = []
    for model in (served, other):
        cache = make_core(model).scheduler.prefix_cache
        assert cache is not None
        keys.append([])
        cache.extend_keys(keys[-1], list(range(32)), 32)
    assert keys[0] != keys[1]


def test_the_engine_measures_its_steps_and_cuts_prompts_to_the_limit(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that takes 10 ms for a step and 1 ms more for every token."""
    now, read, seconds = [0.0], InFlightStep.read, []

    def slow_read(step: InFlightStep) -> StepResult:
        seconds.append(0.01 + step.scheduled.num_tokens / 1000)
        now[0] += seconds[-1]
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", slow_read)
    core = build_engine(EngineConfig(kv_cache_bytes=4_000_000, max_step_ms=60), served, lambda: now[0])
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    core.add(Request("stream", [5, 6, 7], params, 0.0))
    core.add(Request("short", [9] * 40, SamplingParams(max_tokens=2, ignore_eos=True), 0.0))
    for _ in range(6):
        core.step()
    seconds.clear()
    core.add(Request("long", [8] * 400, SamplingParams(max_tokens=2, ignore_eos=True), 0.0))
    while core.scheduler.waiting or any(sequence.num_output_tokens == 0 for sequence in core.scheduler.running):
        core.step()
    assert max(seconds) <= 0.0605
    assert sum(second > 0.055 for second in seconds) >= 6, "the limit is used"
