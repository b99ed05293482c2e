"""A model with recurrent layers in the engine: prefix hits, forks, failures and preemption, against mlx-lm alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.scheduling.sequence import FinishReason, Priority
from mlxpaged.core.step import Step
from tests.engine.hybrid import Hybrid, Run, TinyModel, assert_balanced, request, run
from tests.models.architectures import make_architecture

rng = random.Random(5)


def text(length: int) -> list[int]:
    return [rng.randrange(1, 256) for _ in range(length)]


PROMPTS = [text(length) for length in (40, 9, 21, 3, 33, 16)]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2)


@pytest.fixture(autouse=True)
def _same_texts(request: pytest.FixtureRequest) -> None:
    """All cases of a test have the same texts, so that mlx-lm's answers to them are computed once."""
    rng.seed(request.function.__name__)


def requests_of(prompts: Iterable[list[int]], num_tokens: int = NUM_TOKENS) -> list[Request]:
    return [request(str(i), prompt, num_tokens) for i, prompt in enumerate(prompts)]


def assert_answers(
    hybrid: Hybrid, result: Run, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, but: Iterable[int] = ()
) -> None:
    """Every request has mlx-lm's answer and no error, except some."""
    for i, prompt in enumerate(prompts):
        if i not in but:
            assert result.error(str(i)) is None
            assert hybrid.answer(prompt, num_tokens).equals(result.tokens(str(i))), f"answer {i}"


# -- prefix hits -----------------------------------------------------------------------------------------------------


def test_sixteen_requests_at_once_compute_their_long_prefix_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    hybrid = Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2, block_size=32)
    prefix = text(2000)
    suffixes = [text(5 + i) for i in range(16)]
    prompts = [prefix + suffix for suffix in suffixes]
    answers = hybrid.answers_after(prefix, suffixes, 4)
    core = hybrid.engine(num_blocks=120)
    whole_blocks = 2000 // 32 * 32
    rest = sum(len(prompt) - whole_blocks for prompt in prompts)
    for num_computed in (whole_blocks + rest, rest):
        result = run(core, requests_of(prompts, 4))
        for i, answer in enumerate(answers):
            assert answer.equals(result.tokens(str(i))), f"answer {i}"
        assert result.num_computed() - 16 * 3 <= num_computed


def test_each_turn_of_a_chat_computes_its_own_tokens_only(hybrid: Hybrid, overlaps: bool) -> None:
    core, prompt, num_new = hybrid.engine(), text(50), 50
    for turn in range(8):
        result = run(core, [request("turn", prompt, 10)])
        answer = result.tokens("turn")
        assert hybrid.answer(prompt, 10).equals(answer), f"turn {turn}"
        assert result.num_computed() - 9 <= num_new + hybrid.block_size, f"turn {turn}"
        message = text(11)
        num_new = len(answer) + len(message)
        prompt = [*prompt, *answer, *message]


@pytest.mark.parametrize("num_checkpoints", [0, 1, 3])
def test_answers_are_right_however_few_checkpoints_there_are(
    hybrid: Hybrid, overlaps: bool, num_checkpoints: int
) -> None:
    prefixes = [text(24), text(40)]
    prompts = [prefix + text(14) for _ in range(3) for prefix in prefixes]
    core = hybrid.engine(num_checkpoints=num_checkpoints)
    for each in (prompts, prompts[::-1], prompts[:1], prompts[1:2]):
        assert_answers(hybrid, run(core, requests_of(each)), each)
    checkpoints = core.scheduler.blocks.states.checkpoints
    assert (core.stats().scheduler.prefix_hit_tokens_total > 0) == (num_checkpoints > 0)
    assert len(checkpoints) == num_checkpoints
    assert checkpoints.num_attached > num_checkpoints or num_checkpoints == 0, "some were replaced"


def test_answers_are_right_without_a_prefix_cache(hybrid: Hybrid, overlaps: bool) -> None:
    core = hybrid.engine(prefix_caching=False)
    prompts = [*PROMPTS, *PROMPTS]
    result = run(core, requests_of(prompts))
    assert_answers(hybrid, result, prompts)
    assert core.stats().scheduler.prefix_hit_tokens_total == 0
    assert result.num_computed() == sum(map(len, prompts)) + len(prompts) * (NUM_TOKENS - 1)


def test_cached_blocks_without_a_checkpoint_are_no_hit(hybrid: Hybrid) -> None:
    core = hybrid.engine()
    first = text(40)
    run(core, requests_of([first]))
    branches = [first[:20] + text(9) for _ in range(2)]
    computed = [run(core, [request("0", branch, NUM_TOKENS)]) for branch in branches]
    for branch, result in zip(branches, computed, strict=True):
        assert hybrid.answer(branch, NUM_TOKENS).equals(result.tokens("0"))
    assert [result.num_computed() for result in computed] == [29 + 11, 13 + 11], "the first takes one for the second"


# -- requests that end early, forks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_cancelled_request_changes_no_other_answer(hybrid: Hybrid, overlaps: bool, at: int) -> None:
    core, prefix = hybrid.engine(max_num_batched_tokens=24), text(30)
    prompts = [prefix + prompt for prompt in PROMPTS]
    ended: list[Any] = []

    def cancel(step: int) -> None:
        if step == at:
            ended.extend(core.cancel(["1"])[0])

    result = run(core, requests_of(prompts), cancel)
    assert [each.request_id for each in ended] == ["1"]
    assert_answers(hybrid, result, prompts, but=[1])


@pytest.mark.parametrize("length", [3, 45])
@pytest.mark.parametrize("num_checkpoints", [0, 8])
def test_forks_that_go_apart_have_their_own_states(
    hybrid: Hybrid, overlaps: bool, length: int, num_checkpoints: int
) -> None:
    """As for n=3. Each fork may not use the first token of those before it."""
    core, prompt = hybrid.engine(num_checkpoints=num_checkpoints), text(length)
    banned: list[int] = []
    forks = []
    for i in range(3):
        forks.append(request(str(i), prompt, NUM_TOKENS, tuple(banned), "0" if i else None))
        banned += hybrid.answer(prompt, 1, tuple(banned)).tokens
    result = run(core, [*forks, request("other", PROMPTS[0], NUM_TOKENS)])
    for i in range(3):
        assert hybrid.answer(prompt, NUM_TOKENS, tuple(banned[:i])).equals(result.tokens(str(i))), f"fork {i}"
    assert hybrid.answer(PROMPTS[0], NUM_TOKENS).equals(result.tokens("other"))
    if num_checkpoints:
        tails = 2 * (length - (length - 1) // 8 * 8)
        assert result.num_computed() == length + tails + 3 * 11 + len(PROMPTS[0]) + 11


# -- failures --------------------------------------------------------------------------------------------------------


def fail_when(
    patch: pytest.MonkeyPatch, core: EngineCore, what: str, fails: Callable[[list[str]], bool]
) -> list[list[str]]:
    """Let forward passes or samplers raise. fails: decides by the requests of the step. Returns those that failed."""
    failed: list[list[str]] = []
    forward, sample = core.runner.forward, core.sampler.sample
    names: list[str] = []

    def noting_forward(batch: Step, *args: Any) -> mx.array:
        names[:] = [row.request_id for row in batch.rows]
        if what == "before" and fails(names):
            failed.append(list(names))
            raise ValueError("injected")
        logits = forward(batch, *args)
        if what == "after" and fails(names):
            failed.append(list(names))
            raise ValueError("injected")
        return logits

    def failing_sample(*args: Any) -> Any:
        if what == "sampler" and fails(names):
            failed.append(list(names))
            raise ValueError("injected")
        return sample(*args)

    patch.setattr(core.runner, "forward", noting_forward)
    patch.setattr(core.sampler, "sample", failing_sample)
    return failed


PLACES = pytest.mark.parametrize("what", ["before", "after", "sampler"])
"""The forward pass raises before or after the new states are stored, or the sampler raises."""


@PLACES
@pytest.mark.parametrize("at", [0, 5])
def test_a_step_that_fails_once_changes_no_answer(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch, what: str, at: int
) -> None:
    core, prefix = hybrid.engine(max_num_batched_tokens=70), text(26)
    prompts = [prefix + prompt for prompt in PROMPTS]
    steps = itertools.count()
    failed = fail_when(monkeypatch, core, what, lambda names: next(steps) == at)
    assert_answers(hybrid, run(core, requests_of(prompts)), prompts)
    assert len(failed) == 1
    assert len(failed[0]) > 1


@PLACES
def test_a_request_whose_steps_always_fail_ends_alone(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    core = hybrid.engine()
    failed = fail_when(monkeypatch, core, what, lambda names: "2" in names)
    result = run(core, requests_of(PROMPTS))
    assert_answers(hybrid, result, PROMPTS, but=[2])
    assert "injected" in (result.error("2") or "")
    assert len(failed) == 2


def spoil(patch: pytest.MonkeyPatch, core: EngineCore, name: str, after_tokens: int) -> None:
    """Let a request's logits be NaN from a number of tokens on."""
    forward = core.runner.forward

    def spoiling(batch: Step, *args: Any) -> mx.array:
        logits = forward(batch, *args)
        sampling = [row for row in batch.rows if row.samples]
        bad = [row.request_id == name and row.context_len > after_tokens for row in sampling]
        return mx.where(mx.array(bad)[:, None], mx.nan, logits) if any(bad) else logits

    patch.setattr(core.runner, "forward", spoiling)


@pytest.mark.parametrize("num_answered", [0, 4])
def test_logits_that_are_not_finite_end_one_request_and_its_checkpoints_are_not_used(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch, num_answered: int
) -> None:
    core, prefix = hybrid.engine(), text(26)
    prompts = [prefix + prompt for prompt in PROMPTS]
    with monkeypatch.context() as patch:
        spoil(patch, core, "0", len(prompts[0]) + num_answered - 1)
        result = run(core, requests_of(prompts))
    assert "not finite" in (result.error("0") or "")
    assert result.outputs["0"][-1].finish_reason is FinishReason.ERROR
    assert len(result.tokens("0")) == num_answered
    assert_answers(hybrid, result, prompts, but=[0])
    assert_answers(hybrid, run(core, requests_of(prompts)), prompts)


def test_a_prompt_whose_only_step_is_not_finite_leaves_no_checkpoint(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = hybrid.engine()
    with monkeypatch.context() as patch:
        spoil(patch, core, "0", 0)
        assert run(core, requests_of(PROMPTS[:1])).error("0") is not None
    assert len(core.scheduler.blocks.states.checkpoints) == 0
    result = run(core, requests_of(PROMPTS[:1]))
    assert_answers(hybrid, result, PROMPTS[:1])
    assert result.num_computed() == len(PROMPTS[0]) + NUM_TOKENS - 1


@pytest.mark.parametrize("at", [0, 1, 5])
def test_after_a_device_error_all_states_are_computed_anew(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    core, prefix = hybrid.engine(swap_blocks=100), text(26)
    prompts = [prefix + prompt for prompt in PROMPTS]
    run(core, requests_of(prompts))
    assert len(core.scheduler.blocks.states.checkpoints) > 0
    read, reads = InFlightStep.read, itertools.count()

    def failing(step: InFlightStep) -> Any:
        if next(reads) == at:
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", failing)
    result = run(core, requests_of(prompts))
    assert_answers(hybrid, result, prompts)
    assert result.num_computed() > sum(map(len, PROMPTS)) + 26, "no state from before is left"


# -- preemption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap_blocks", [0, 200], ids=["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no-cache", "cache"])
@pytest.mark.rotated("models")
def test_preempted_sequences_continue_with_their_states(
    hybrid: Hybrid, overlaps: bool, swap_blocks: int, prefix_caching: bool
) -> None:
    core = hybrid.engine(num_blocks=12, swap_blocks=swap_blocks, prefix_caching=prefix_caching)
    result = run(core, requests_of(PROMPTS, 25))
    assert_answers(hybrid, result, PROMPTS, 25)
    stats = core.stats().scheduler
    assert stats.preemptions_total > 0
    assert (stats.blocks_swapped_in_total > 0) == (swap_blocks > 0)
    if swap_blocks and not prefix_caching:
        assert result.num_computed() == sum(map(len, PROMPTS)) + len(PROMPTS) * 24, "nothing is computed twice"


def test_a_state_that_still_grows_is_swapped_as_it_is(tmp_path: Path) -> None:
    """The embeddings of n-grams keep the last two tokens, of which there is one."""
    model = TinyModel(make_architecture(tmp_path / "model", "longcat_flash_ngram"))
    core, result = model.engine(max_num_seqs=1, swap_blocks=100), Run()
    core.add(request("low", [5], NUM_TOKENS, priority=Priority.LOW))
    result.note(core.step())
    core.add(request("high", [9], 1, priority=Priority.HIGH))
    while core.has_work():
        result.note(core.step())
    assert core.stats().scheduler.blocks_swapped_in_total == 1
    assert model.answer([5], NUM_TOKENS).equals(result.tokens("low"))


def test_swapped_states_that_cannot_be_read_back_are_recomputed(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = hybrid.engine(num_blocks=12, swap_blocks=200)
    load, loads = core.runner.swap.load_arrays, itertools.count()

    def failing(*args: Any) -> Any:
        if next(loads) == 0:
            raise OSError("injected")
        return load(*args)

    monkeypatch.setattr(core.runner.swap, "load_arrays", failing)
    assert_answers(hybrid, run(core, requests_of(PROMPTS, 25)), PROMPTS, 25)
    assert next(loads) > 1
    assert_balanced(core)


def test_moves_and_the_step_after_them_may_fail_together(
    hybrid: Hybrid, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that do not need the moves run without the others, and must not run twice if their sampler fails."""
    core = hybrid.engine(num_blocks=14, swap_blocks=200)
    load, moves_failed = core.runner.swap.load_arrays, []

    def failing_load(*args: Any) -> Any:
        if not moves_failed:
            moves_failed.append(True)
            raise OSError("injected")
        return load(*args)

    monkeypatch.setattr(core.runner.swap, "load_arrays", failing_load)
    steps = itertools.count()
    failed = fail_when(monkeypatch, core, "sampler", lambda names: bool(moves_failed) and next(steps) == 0)
    assert_answers(hybrid, run(core, requests_of(PROMPTS, 25)), PROMPTS, 25)
    assert len(failed) == 1
    assert len(failed[0]) > 1


def test_a_block_that_an_ended_answer_should_have_filled_in_a_failed_step_is_used_by_no_other(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stops while the next step is launched, which would write its last token into the cache."""
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    prompt = text(20)
    stop_at = 31 - len(prompt)  # the index of the answer's token that fills the fourth block
    answer = hybrid.answer(prompt, stop_at + 1).tokens
    assert answer.index(answer[-1]) == stop_at
    core = hybrid.engine()
    stopped = request("stopped", prompt, 30)
    stopped = replace(stopped, params=replace(stopped.params, stop_token_ids=frozenset(answer[-1:])))
    samples = len(answer)
    failed = fail_when(monkeypatch, core, "before", lambda names: next(steps) == samples)
    steps = itertools.count()
    result = run(core, [stopped, request("other", PROMPTS[0], 20)])
    assert result.outputs["stopped"][-1].finish_reason is FinishReason.STOP
    assert hybrid.answer(PROMPTS[0], 20).equals(result.tokens("other"))
    assert failed == [["stopped", "other"]]
    for _ in range(3):  # the second one takes a checkpoint where the first one parted
        following = [*prompt, *answer, *text(7)]
        result = run(core, [request("next turn", following, NUM_TOKENS)])
        assert hybrid.answer(following, NUM_TOKENS).equals(result.tokens("next turn"))
