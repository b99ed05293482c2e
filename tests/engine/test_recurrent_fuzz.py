"""Random requests to a hybrid model: whatever happens around a request, its answer is that of the request alone.

60 requests run by default, 2,000 with `make test-models`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from mlxpaged.engine import EngineCore
from mlxpaged.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.engine.step import InFlightStep
from mlxpaged.scheduler import Priority
from tests.engine.hybrid import Hybrid, Run, assert_balanced, request

VOCABULARY = range(1, 200)
LONGEST = 90


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(tmp_path_factory.mktemp("hybrid") / "model", num_layers=2)


@dataclass(frozen=True)
class Asked:
    """One request of a session."""

    name: str
    prompt: list[int]
    num_tokens: int
    banned: tuple[int, ...] = ()
    fork_of: str | None = None
    priority: Priority = Priority.NORMAL


def make_requests(hybrid: Hybrid, rng: random.Random, count: int) -> list[Asked]:
    """Prompts that share prefixes, next turns of earlier ones, and forks that may not use the first token."""
    prefixes = [[rng.choice(VOCABULARY) for _ in range(rng.randint(8, 60))] for _ in range(4)]
    asked: list[Asked] = []
    while len(asked) < count:
        tail = [rng.choice(VOCABULARY) for _ in range(rng.randint(1, 14))]
        name, num_tokens, priority = str(len(asked)), rng.randint(1, 12), rng.choice(list(Priority))
        kind = rng.random()
        if asked and kind < 0.2:
            last = rng.choice(asked[-5:])
            prompt = [*last.prompt, *hybrid.answer(last.prompt, last.num_tokens, last.banned).tokens, *tail]
        elif asked and kind < 0.35:
            parent = asked[-1]
            banned = (*parent.banned, hybrid.answer(parent.prompt, 1, parent.banned).tokens[0])
            asked.append(Asked(name, parent.prompt, num_tokens, banned, parent.fork_of or parent.name, priority))
            continue
        else:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.randint(0, len(prefix))] + tail
        if len(prompt) <= LONGEST:
            asked.append(Asked(name, prompt, num_tokens, priority=priority))
    return asked


def make_engine(hybrid: Hybrid, rng: random.Random) -> EngineCore:
    """A pool that is too small, and any number of checkpoints."""
    return hybrid.engine(
        num_blocks=rng.choice((14, 18, 30)),
        swap_blocks=rng.choice((0, 8, 60)),
        num_checkpoints=rng.choice((0, 1, 2, 4, 30)),
        max_num_seqs=rng.choice((3, 6, 10)),
        max_num_batched_tokens=rng.choice((16, 40, 200)),
        prefill_mode=rng.choice(("mixed", "mixed", "separate")),
        prefix_caching=rng.random() < 0.9,
    )


def let_calls_fail(patch: pytest.MonkeyPatch, core: EngineCore, rng: random.Random, rate: float) -> None:
    """Forward passes, samplers and devices fail by chance, but none twice in a row: that would end a request."""
    forward, sample, read = core.runner.forward, core.sampler.sample, InFlightStep.read

    def is_hit() -> bool:
        hit_before = any(running.sequence.num_step_failures for running in core.requests.values())
        return not hit_before and rng.random() < rate

    def failing_forward(*args: object) -> object:
        if is_hit():
            raise ValueError("injected")
        logits = forward(*args)  # type: ignore[arg-type]
        if is_hit():
            raise ValueError("injected")
        return logits

    def failing_sample(*args: object) -> object:
        if is_hit():
            raise ValueError("injected")
        return sample(*args)  # type: ignore[arg-type]

    def failing_read(step: InFlightStep) -> object:
        if is_hit():
            for layer in core.runner.layers:
                layer.kv.clear()
            raise DeviceError("injected")
        return read(step)

    patch.setattr(core.runner, "forward", failing_forward)
    patch.setattr(core.sampler, "sample", failing_sample)
    patch.setattr(InFlightStep, "read", failing_read)


def play(hybrid: Hybrid, seed: int, count: int) -> dict[str, int]:
    """One session. Returns how often what happened."""
    rng = random.Random(seed)
    asked, core, result = make_requests(hybrid, rng, count), make_engine(hybrid, rng), Run()
    waiting, cancelled = list(asked), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "overlaps", rng.random() < 0.5)
        let_calls_fail(patch, core, rng, rng.choice((0.0, 0.02)))
        while waiting or core.has_work():
            while waiting and (rng.random() < 0.4 or waiting[0].fork_of is not None):
                each = waiting.pop(0)
                options = each.banned, each.fork_of, each.priority
                core.add(request(each.name, each.prompt, each.num_tokens, *options))
            if rng.random() < 0.03:
                name = str(rng.randrange(count))
                ended, outputs = core.cancel([name])
                cancelled |= {each.request_id for each in ended}
                result.note(outputs)
            if core.has_work():
                result.note(core.step())
    for each in asked:
        if each.name not in cancelled:
            assert result.error(each.name) is None
            right = hybrid.answer(each.prompt, each.num_tokens, each.banned)
            assert right.equals(result.tokens(each.name)), f"seed {seed}, request {each}"
    assert_balanced(core)
    core.clear_cache()
    assert len(core.scheduler.blocks.checkpoints) == 0
    assert_balanced(core)
    stats = core.stats().scheduler
    return {
        "preemptions": stats.preemptions_total,
        "swapped in": stats.blocks_swapped_in_total,
        "hits": stats.prefix_hit_tokens_total,
        "cancelled": len(cancelled),
    }


def play_all(hybrid: Hybrid, seeds: range, count: int) -> None:
    """Sessions of `count` requests. Everything must have happened in one of them."""
    totals: dict[str, int] = {}
    for seed in seeds:
        for name, number in play(hybrid, seed, count).items():
            totals[name] = totals.get(name, 0) + number
    assert all(totals.values()), totals


def test_answers_among_60_random_requests_are_those_of_requests_alone(hybrid: Hybrid) -> None:
    play_all(hybrid, range(3), 20)


@pytest.mark.models
@pytest.mark.parametrize("first", range(0, 50, 5))
def test_answers_among_2000_random_requests_are_those_of_requests_alone(hybrid: Hybrid, first: int) -> None:
    play_all(hybrid, range(100 + first, 105 + first), 40)
