"""Models with recurrent states have the same answers with drafts as without, of which many are rejected."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.config import MOST_STATES
from mlxpaged.core.step import Row, Step
from mlxpaged.models.layers import is_per_sequence
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.states.rollback import Rollback
from mlxpaged.parts.drafting.drafting import Drafting
from tests.engine.helpers import make_core
from tests.engine.test_drafting import (
    answers,
    every_other_step,
    prompt,
    requests,
    tokens_of,
    use_oracle,
)
from tests.models.architectures import is_installed, make_architecture

FAMILIES = (
    "qwen3_5",
    "qwen3_next",
    "lfm2",
    "nemotron_h",
    "kimi_linear",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "mamba",
    "mamba2",
    "bailing_hybrid",
    "bailing_moe_linear",
    "olmo_hybrid",
    "recurrent_gemma",
    "longcat_flash_ngram",
    "rwkv7",
)
QUICK = ("qwen3_5", "lfm2")

SMALL = {"block_size": 8, "blocks": 6}
"""A pool for few of the sequences."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.models])
        for name in FAMILIES
        if is_installed(name)
    ],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    model = load_model(str(make_architecture(tmp_path_factory.mktemp("drafting") / "m", request.param)))
    assert not is_per_sequence(model.layers)
    return model


@pytest.fixture(scope="module")
def expected(served: ServedModel) -> dict[str, tuple[int, ...]]:
    """The answers without drafts."""
    return tokens_of(answers(make_core(served), requests(16)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_architecture(tmp_path_factory.mktemp("drafting") / "m", "qwen3_5")))


@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 24, "max_num_seqs": 12}, True),
        (SMALL, True),
        (SMALL | {"swap_blocks": 40}, False),
    ],
    ids=["plain", "chunks", "recompute", "swap"],
)
@pytest.mark.rotated("models")
def test_sixteen_answers_are_those_without_drafts(
    served: ServedModel,
    expected: dict[str, tuple[int, ...]],
    options: dict[str, Any],
    overlaps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In steps that overlap, only every other pair of steps has drafts."""
    monkeypatch.setattr(ModelRunner, "overlaps", overlaps)
    core = make_core(served, speculative="ngram", **options)
    drafting = use_oracle(core, expected)
    if overlaps:
        drafting.budget.lengths = every_other_step()
    assert tokens_of(answers(core, requests(16))) == expected
    assert drafting.stats().drafted_total > drafting.stats().accepted_total > 60
    assert core.runner.rollback.module_calls > 0
    stats = core.scheduler.stats()
    if "blocks" in options and any(spec.window is None for spec in served.kv_layers):  # windows need few blocks
        assert stats.preemptions_total > 0
        assert (stats.blocks_swapped_in_total > 0) == ("swap_blocks" in options)
    assert core.scheduler.pool.usage().used == 0


def test_alone_answers_are_those_without_drafts(served: ServedModel) -> None:
    plain, core = make_core(served), make_core(served, speculative="ngram")
    for each in requests(5):
        expected = answers(plain, [each])
        use_oracle(core, tokens_of(expected))
        assert tokens_of(answers(core, [each])) == tokens_of(expected)
    assert core.stats().steps_total < plain.stats().steps_total * 3 // 4


def test_later_turns_start_from_the_checkpoints_that_they_have_without_drafts(served: ServedModel) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=5, ignore_eos=True)

    def play(core: EngineCore, of_oracle: Any) -> tuple[dict[str, tuple[int, ...]], list[int]]:
        text, found, hits = prompt(1, 60), {}, []
        for turn in ("a", "b", "c"):
            if of_oracle is not None:
                use_oracle(core, of_oracle)
            branches = [Request(turn, text, params, 0.0), Request(f"{turn}2", [*text[:-3], 9, 9], params, 0.0)]
            got = answers(core, branches)
            hits += [output.num_cached_tokens for output in got.values()]
            found |= tokens_of(got)
            text = [*text, *got[turn].token_ids, *prompt(2, 9)]
        return found, hits

    expected = play(make_core(served, block_size=8), None)
    assert play(make_core(served, speculative="ngram", block_size=8), expected[0]) == expected
    assert expected[1][2] > 50


@pytest.mark.parametrize("at", [3, 4, *(pytest.param(at, marks=pytest.mark.models) for at in (5, 9))])
def test_aborted_requests_change_no_other_answer(qwen: ServedModel, at: int) -> None:
    expected = tokens_of(answers(make_core(qwen), requests(6)))
    core = make_core(qwen, speculative="ngram")
    use_oracle(core, expected)
    core.submit(requests(6))
    got: dict[str, tuple[int, ...]] = {}
    step = 0
    while core.has_work():
        if step == at:
            core.cancel(["r1", "r4"])
        for output in core.step():
            got[output.request_id] = got.get(output.request_id, ()) + output.token_ids
        step += 1
    assert {name: got[name] for name in ("r0", "r2", "r3", "r5")} == {
        name: expected[name] for name in ("r0", "r2", "r3", "r5")
    }
    again = [each for each in requests(6) if each.request_id in ("r1", "r4")]
    assert tokens_of(answers(core, again)) == {name: expected[name] for name in ("r1", "r4")}


def test_failed_steps_are_recomputed(qwen: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host before the forward pass and after it, and on the device."""
    expected = tokens_of(answers(make_core(qwen), requests()))
    core = make_core(qwen, speculative="ngram")
    use_oracle(core, expected)
    forward, failures = core.runner.forward, [ValueError("before"), ValueError("after"), DeviceError("injected")]

    def sometimes_failing(step: Step, *args: Any) -> Any:
        failed = any(each.num_step_failures for each in core.scheduler.sequences.values())
        if not failures or failed or not step.has_drafts or not core.runner.rollback.argument_bytes:
            return forward(step, *args)
        failure = failures.pop(0)
        if failure.args == ("after",):
            forward(step, *args)
        raise failure

    monkeypatch.setattr(core.runner, "forward", sometimes_failing)
    assert tokens_of(answers(core, requests())) == expected
    assert not failures


def test_a_module_runs_once_for_rows_of_as_many_tokens_and_once_for_all_that_are_taken_back(
    qwen: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [layer.linear_attn for layer in qwen.model.layers if "linear_attn" in layer]
    module = type(modules[0]).__mro__[1]
    calls, expected_calls, last = 0, 0, dict[int, Row]()
    call = module.__call__

    @functools.wraps(call)
    def counting(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(self, *args, **named)

    asked = [
        Request(f"r{i}", prompt(i, 9), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True), float(i))
        for i in range(3)
    ]
    expected = tokens_of(answers(make_core(qwen), asked))
    core = make_core(qwen, speculative="ngram")
    use_oracle(core, expected)
    forward = core.runner.forward

    def noting(step: Step, *args: Any) -> Any:
        nonlocal expected_calls
        decoding = [row for row in step.rows if row.start]
        expected_calls += len(step.rows) - len(decoding) + len({row.num_tokens for row in decoding})
        expected_calls += any(last[row.sequence_id].context_len > row.start for row in decoding)
        last.update((row.sequence_id, row) for row in step.rows)
        return forward(step, *args)

    monkeypatch.setattr(core.runner, "forward", noting)
    monkeypatch.setattr(module, "__call__", counting)
    assert tokens_of(answers(core, asked)) == expected
    assert calls == expected_calls * len(modules)
    assert calls < 150 * len(modules)


def test_no_more_states_are_kept_than_memory_is_left_for(qwen: ServedModel) -> None:
    """Of more sequences than that, those with the best chances have drafts."""
    count = MOST_STATES + 4
    asked = [
        Request(f"r{i}", prompt(i, 9), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), float(i))
        for i in range(count)
    ]
    expected = answers(make_core(qwen), asked)
    core = make_core(qwen, speculative="ngram")
    use_oracle(core, tokens_of(expected))
    most = 0
    schedule = core.scheduler.schedule

    def noting_schedule() -> Any:
        nonlocal most
        step = schedule()
        most = max(most, sum(bool(row.drafts) for row in step.rows))
        return step

    core.scheduler.schedule = noting_schedule  # type: ignore[method-assign]
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert most == MOST_STATES


@pytest.mark.parametrize("fault", ["nothing is taken back", "it raises"])
def test_a_model_whose_states_are_not_taken_back_rightly_decodes_without_drafts(
    qwen: ServedModel, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: Any) -> None:
        if fault == "it raises":
            raise ValueError("injected")

    monkeypatch.setattr(Rollback, "roll_back", broken)
    core = make_core(qwen, speculative="ngram")
    assert core.part(Drafting) is None
    assert "decodes without drafts" in caplog.text
    monkeypatch.undo()
    assert make_core(qwen, speculative="ngram").part(Drafting) is not None
