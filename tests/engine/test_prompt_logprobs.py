"""Log-probabilities of prompts equal those of one forward pass by mlx-lm, however the engine computes the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.core.engine import prompt_logits
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.logprobs import PromptLogprobs
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.prompt_logits import BYTES_PER_LOGIT, max_prompt_logits
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence
from mlxpaged.core.step import Row, Step
from tests.engine.hybrid import Hybrid, TinyModel, run
from tests.models.architectures import VOCAB_SIZE
from tests.support import make_tiny_model

pytestmark = pytest.mark.usefixtures("overlaps")


TOLERANCE = 1e-4
PROMPT = [(7 * i) % 91 + 16 for i in range(70)]
OTHER = [(5 * i) % 83 + 20 for i in range(50)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return Hybrid(tmp_path_factory.mktemp("hybrid"), num_layers=2)


@pytest.fixture
def limit_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[TinyModel, int], None]:
    """A step of new engines computes logits of no more than so many prompt tokens."""

    def limit(model: TinyModel, count: int) -> None:
        monkeypatch.setattr(prompt_logits, "MAX_BYTES", count * BYTES_PER_LOGIT * model.served.vocab_size)

    return limit


def request(name: str, prompt: list[int], top: int | None = 3, **params: Any) -> Request:
    fork_of = params.pop("fork_of", None)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True} | params
    arrived = time.monotonic() + options.pop("later", 0.0)
    return Request(
        name, prompt, SamplingParams(prompt_logprobs=top, **options), arrived, fork_of=fork_of, timeline=True
    )


def logprobs_of(outputs: list[RequestOutput]) -> PromptLogprobs:
    """They come once, with the first output."""
    assert outputs[-1].error is None, outputs[-1].error
    [found] = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert outputs[0].prompt_logprobs is found
    return found


def check(model: TinyModel, found: PromptLogprobs, prompt: list[int], top: int = 3) -> None:
    """They equal mlx-lm's, and all of them are known."""
    logits = model.plain(mx.array([prompt]), cache=make_prompt_cache(model.plain))[0].astype(mx.float32)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]
    own = expected[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(found.logprobs, own, atol=TOLERANCE)
    ranked = np.sort(expected, axis=-1)[:, ::-1]
    np.testing.assert_allclose(found.top_logprobs, ranked[:, :top], atol=TOLERANCE)
    at_ids = np.take_along_axis(expected, found.top_ids, axis=-1)
    np.testing.assert_allclose(at_ids, found.top_logprobs, atol=TOLERANCE)
    np.testing.assert_allclose(np.take_along_axis(ranked, found.ranks[:, None] - 1, axis=-1)[:, 0], own, atol=TOLERANCE)


@pytest.fixture(params=["tiny", "hybrid"])
def model(request: pytest.FixtureRequest) -> TinyModel:
    """With attention only, and with recurrent states."""
    found: TinyModel = request.getfixturevalue(request.param)
    return found


def test_they_are_exact_in_chunks_beside_other_requests(model: TinyModel) -> None:
    core = model.engine(max_num_batched_tokens=24)
    done = run(core, [request("plain", OTHER, None, max_tokens=20), request("a", PROMPT), request("b", OTHER, 0)])
    check(model, logprobs_of(done.outputs["a"]), PROMPT)
    check(model, logprobs_of(done.outputs["b"]), OTHER, 0)
    assert all(output.prompt_logprobs is None for output in done.outputs["plain"])
    assert max(len(row.prompt_logprobs) for batch in done.batches for row in batch.rows) < len(PROMPT) - 1
    assert done.tokens("a") == model.answer(PROMPT, 2).tokens


def test_a_cached_prompt_is_computed_again_for_them_and_serves_those_who_need_none(model: TinyModel) -> None:
    core = model.engine()
    first = run(core, [request("a", PROMPT)])
    again = run(core, [request("a", PROMPT), request("plain", [*PROMPT, 30], None)])
    for done in (first, again):
        check(model, logprobs_of(done.outputs["a"]), PROMPT)
        assert done.outputs["a"][-1].num_cached_tokens == 0
    assert again.outputs["plain"][-1].num_cached_tokens >= 64
    assert again.num_computed("a") == len(PROMPT) + 1


@pytest.mark.parametrize(("swap_blocks", "max_tokens"), [(0, 2), (40, 0)])
def test_a_preemption_loses_none(
    model: TinyModel, swap_blocks: int, max_tokens: int, limit_logits: Callable[[TinyModel, int], None]
) -> None:
    """The older request grows until the younger one, whose prompt is not complete, loses its blocks."""
    limit_logits(model, 3)
    core = model.engine(num_blocks=12, swap_blocks=swap_blocks, max_num_seqs=2)
    requests = [request("old", OTHER[:30], None, max_tokens=40), request("young", PROMPT[:60], max_tokens=max_tokens)]
    done = run(core, requests)
    check(model, logprobs_of(done.outputs["young"]), PROMPT[:60])
    [timeline] = [output.timeline for output in done.outputs["young"] if output.timeline is not None]
    assert timeline.preemptions > 0
    assert timeline.swaps_out == timeline.preemptions * bool(swap_blocks)


def test_known_ones_are_not_computed_again_after_a_preemption(tiny: TinyModel, overlaps: bool) -> None:
    core = tiny.engine(max_num_batched_tokens=16)
    core.add(request("a", PROMPT))
    for _ in range(3 + overlaps):
        core.step()
    [sequence] = core.scheduler.running
    assert sequence.logits_from == 48
    core.scheduler.recompute(sequence)
    done = run(core, [])
    check(tiny, logprobs_of(done.outputs["a"]), PROMPT)
    wanted = [position for batch in done.batches for row in batch.rows for position in row.prompt_logprobs]
    assert wanted == list(range(49, 70))
    first = next(row for batch in done.batches for row in batch.rows)
    assert first.start == 48, "the cache has the tokens before"


def test_failed_steps_lose_none(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []
    forward, read = ModelRunner.forward, InFlightStep.read

    def failing_forward(runner: ModelRunner, batch: Step, *args: Any) -> mx.array:
        logits = forward(runner, batch, *args)
        if any(row.start == 30 for row in batch.rows) and not failed:
            failed.append("host")
            raise RuntimeError("injected")
        return logits

    def failing_read(step: InFlightStep) -> Any:
        if any(row.start == 46 for row in step.scheduled.rows) and len(failed) == 1:
            failed.append("device")
            raise DeviceError("injected")
        return read(step)

    monkeypatch.setattr(ModelRunner, "forward", failing_forward)
    monkeypatch.setattr(InFlightStep, "read", failing_read)
    requests = [request("plain", [20, 21], None, max_tokens=9), request("a", PROMPT)]
    done = run(tiny.engine(max_num_batched_tokens=32), requests)
    check(tiny, logprobs_of(done.outputs["a"]), PROMPT)
    assert failed == ["host", "device"]


def test_what_another_requests_failure_discards_is_computed_again(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are discarded for a request that shared blocks with one that fails. The step in flight is one of them, also
    if the request waits when its end is read."""
    core = tiny.engine(max_num_batched_tokens=24, max_num_seqs=2)
    forward, fail = core.runner.forward, core.scheduler.fail

    def spoiling_forward(batch: Step, *args: Any) -> mx.array:
        logits = forward(batch, *args)
        bad = [row.request_id == "bad" and row.start == 3 for row in batch.rows if row.samples]
        return mx.concatenate([logits[:1] * mx.nan, logits[1:]]) if any(bad) else logits

    def sharing_fail(*arguments: Any) -> list[Sequence]:
        preempted = fail(*arguments)
        [other] = core.scheduler.running  # as if it shared the block of the last token
        core.scheduler.recompute(other)
        other.drop_pending_tokens()
        return [*preempted, other]

    monkeypatch.setattr(core.runner, "forward", spoiling_forward)
    monkeypatch.setattr(core.scheduler, "fail", sharing_fail)
    core.add(request("bad", [20, 21], None, max_tokens=9))
    core.add(request("a", PROMPT))
    core.step()
    older = [replace(request(name, OTHER, None), arrival_time=0.0) for name in ("first", "second")]
    done = run(core, older)
    assert done.error("bad") == "the model's logits are not finite"
    check(tiny, logprobs_of(done.outputs["a"]), PROMPT)


def test_logits_that_are_not_finite_end_the_request(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def broken(runner: ModelRunner, batch: Step, *args: Any) -> mx.array:
        logits = forward(runner, batch, *args)
        bad = any(row.request_id == "bad" and row.prompt_logprobs for row in batch.rows)
        return mx.concatenate([logits[:-1], logits[-1:] * mx.nan]) if bad else logits

    monkeypatch.setattr(ModelRunner, "forward", broken)
    done = run(tiny.engine(), [request("good", OTHER), request("bad", PROMPT)])
    assert done.error("bad") == "the model's logits are not finite"
    check(tiny, logprobs_of(done.outputs["good"]), OTHER)


def test_answers_to_one_prompt_share_them(tiny: TinyModel) -> None:
    requests = [request("a", PROMPT), request("b", PROMPT, fork_of="a"), request("c", PROMPT, fork_of="a")]
    done = run(tiny.engine(), requests)
    found = [logprobs_of(done.outputs[name]) for name in "abc"]
    check(tiny, found[0], PROMPT)
    assert found[0] is found[1] is found[2]
    assert done.num_computed("b") == 2, "the last token of the prompt, and the first one of the answer"


def test_a_step_computes_a_limited_number_of_logits_and_other_prompts_do_not_wait(
    tiny: TinyModel, limit_logits: Callable[[TinyModel, int], None]
) -> None:
    limit_logits(tiny, 11)
    others = request("b", OTHER, later=1.0), request("plain", [*OTHER, 17], None, later=1.0)
    done = run(tiny.engine(max_num_batched_tokens=128), [request("a", PROMPT), *others])
    check(tiny, logprobs_of(done.outputs["a"]), PROMPT)
    check(tiny, logprobs_of(done.outputs["b"]), OTHER)
    assert max(sum(len(row.prompt_logprobs) for row in batch.rows) for batch in done.batches) == 11
    assert [row.request_id for row in done.batches[0].rows] == ["a", "plain"]
    assert done.batches[0].rows[1].num_tokens == len(OTHER) + 1


@pytest.mark.parametrize("top", [None, 2])
def test_without_tokens_to_generate_a_request_ends_with_its_prompt(
    model: TinyModel, top: int | None, overlaps: bool
) -> None:
    core = model.engine(max_num_batched_tokens=24)
    prompts = {"a": PROMPT, "one": [20], "a chunk and one": PROMPT[1:26]}
    requests = [request(name, prompt, top, max_tokens=0) for name, prompt in prompts.items()]
    done = run(core, [request("plain", OTHER, None, max_tokens=9), *requests])
    for name, prompt in prompts.items():
        [output] = done.outputs[name]
        assert output.finish_reason is FinishReason.LENGTH
        assert (output.text, output.token_ids, output.num_output_tokens) == ("", (), 0)
        assert done.num_computed(name) == len(prompt)
        assert output.timeline is not None
        assert sum(output.timeline.prompt_chunks) == len(prompt)
        if top is not None:
            check(model, logprobs_of([output]), prompt, top)
    assert len(done.tokens("plain")) == 9
    assert core.stats().generated_tokens_total == 9


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_memory_that_is_reserved_for_them_is_enough(top: int) -> None:
    vocab_size, rows = 50_000, 40
    prompt = list(range(rows + 1))
    batch = Step([Row(0, 0, prompt, range(rows + 1), num_sampled=1)])
    hidden, head = mx.random.normal((rows + 1, 16)), mx.random.normal((16, vocab_size)).astype(mx.bfloat16)
    mx.eval(hidden, head)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    step = InFlightStep(batch, 0.0, hidden.astype(mx.bfloat16) @ head, prompt[1:], top)
    mx.eval(step.results)
    assert mx.get_peak_memory() - before <= rows * vocab_size * BYTES_PER_LOGIT
    del step
    assert max_prompt_logits(152_000, 2048) == 55
    assert max_prompt_logits(1000, 2048) == 2048
