"""Sessions of random requests: whatever happens around a request, its answer is that of the request alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.step import Step
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from tests.engine.hybrid import Run, TinyModel, assert_balanced, request
from tests.engine.test_drafting import use_oracle

VOCABULARY = range(1, 200)
LONGEST = 90
"""Most tokens of a prompt."""

MOST_TOKENS = 12
"""Most tokens of an answer."""

MakeEngine = Callable[[TinyModel, random.Random], EngineCore]


@dataclass(frozen=True)
class Asked:
    """One request of a session."""

    name: str
    prompt: list[int]
    num_tokens: int
    banned: tuple[int, ...] = ()
    fork_of: str | None = None
    priority: Priority = Priority.NORMAL


def make_requests(model: TinyModel, rng: random.Random, count: int) -> list[Asked]:
    """Prompts that share prefixes, next turns of earlier ones, and forks that may not use the first token."""
    prefixes = [[rng.choice(VOCABULARY) for _ in range(rng.randint(8, 60))] for _ in range(4)]
    asked: list[Asked] = []
    while len(asked) < count:
        tail = [rng.choice(VOCABULARY) for _ in range(rng.randint(1, 14))]
        name, num_tokens, priority = str(len(asked)), rng.randint(1, MOST_TOKENS), rng.choice(list(Priority))
        kind = rng.random()
        if asked and kind < 0.2:
            last = rng.choice(asked[-5:])
            prompt = [*last.prompt, *model.answer(last.prompt, last.num_tokens, last.banned).tokens, *tail]
        elif asked and kind < 0.35:
            parent = asked[-1]
            banned = (*parent.banned, model.answer(parent.prompt, 1, parent.banned).tokens[0])
            asked.append(Asked(name, parent.prompt, num_tokens, banned, parent.fork_of or parent.name, priority))
            continue
        else:
            prefix = rng.choice(prefixes)
            prompt = prefix[: rng.randint(0, len(prefix))] + tail
        if len(prompt) <= LONGEST:
            asked.append(Asked(name, prompt, num_tokens, priority=priority))
    return asked


def let_calls_fail(patch: pytest.MonkeyPatch, core: EngineCore, rng: random.Random, rate: float) -> None:
    """Forward passes, samplers and devices fail by chance, but not so that a request ends: none twice in a row, and
    no call of a single row, unless its step is recomputed instead of repeated."""
    forward, sample, read = core.runner.forward, core.sampler.sample, InFlightStep.read

    def is_hit() -> bool:
        hit_before = any(running.sequence.num_step_failures for running in core.requests.by_sequence.values())
        return not hit_before and rng.random() < rate

    def is_host_hit(num_rows: int) -> bool:
        return (num_rows > 1 or core.runner.is_recurrent) and is_hit()

    def failing_forward(batch: Step, *args: object) -> object:
        if is_host_hit(len(batch.rows)):
            raise ValueError("injected")
        logits = forward(batch, *args)  # type: ignore[arg-type]
        if is_host_hit(len(batch.rows)):
            raise ValueError("injected")
        return logits

    def failing_sample(logits: object, rows: list[object]) -> object:
        if is_host_hit(len(rows)):
            raise ValueError("injected")
        return sample(logits, rows)  # type: ignore[arg-type]

    def failing_read(step: InFlightStep) -> object:
        if is_hit():
            for pool in core.runner.pools:
                pool.clear()
            raise DeviceError("injected")
        return read(step)

    patch.setattr(core.runner, "forward", failing_forward)
    patch.setattr(core.sampler, "sample", failing_sample)
    patch.setattr(InFlightStep, "read", failing_read)


def play(model: TinyModel, make_engine: MakeEngine, seed: int, count: int) -> dict[str, int]:
    """One session. Returns how often what happened."""
    rng = random.Random(seed)
    asked, core, result = make_requests(model, rng, count), make_engine(model, rng), Run()
    waiting, cancelled = list(asked), set()
    drafting = core.part(Drafting)
    if drafting is not None:
        known = {each.name: model.answer(each.prompt, each.num_tokens, each.banned).tokens for each in asked}
        use_oracle(core, known, seed)
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
            right = model.answer(each.prompt, each.num_tokens, each.banned)
            assert right.equals(result.tokens(each.name)), f"seed {seed}, request {each}"
    assert_balanced(core)
    core.clear_cache()
    assert len(core.scheduler.blocks.states.checkpoints) == 0
    assert_balanced(core)
    stats, drafts = core.stats().scheduler, core.stats().of(NO_DRAFTS)
    return {
        "preemptions": stats.preemptions_total,
        "swapped in": stats.blocks_swapped_in_total,
        "hits": stats.prefix_hit_tokens_total,
        "cancelled": len(cancelled),
    } | ({} if core.part(Drafting) is None else {"accepted": drafts.accepted_total})


def play_all(model: TinyModel, make_engine: MakeEngine, seeds: range, count: int) -> None:
    """Sessions of `count` requests. Everything must have happened in one of them."""
    totals: dict[str, int] = {}
    for seed in seeds:
        for name, number in play(model, make_engine, seed, count).items():
            totals[name] = totals.get(name, 0) + number
    assert all(totals.values()), totals
