"""For any requests: the books balance, no sequence reads foreign KV or waits forever, and each ends once.

MLXPAGED_LONG=1 runs the same machine for minutes (`make test-scheduler`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxpaged.core.scheduling import scheduler as scheduler_module
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence
from tests.scheduler.simulation import FakeClock, Simulation, answer, make_scheduler, sequence, undisturbed

LONG = bool(os.environ.get("MLXPAGED_LONG"))

priorities = st.sampled_from(Priority)


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts of two letters share prefixes often, and a small pool runs out often."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation: Simulation | None = None

    @initialize(
        num_blocks=st.integers(3, 24),
        num_swap_slots=st.sampled_from([0, 0, 3, 8, 200]),
        cap=st.integers(1, 6),
        budget=st.integers(6, 24),
        decode_preference=st.sampled_from([0.2, 0.5, 0.9]),
        starvation_bound=st.sampled_from([1, 3, 64]),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
        windows=st.sampled_from([(None,), (None,), (None, 6), (None, 3, 9), (5,), (1, 8)]),
        start_share=st.sampled_from([1.0, 1.0, 0.5, 0.1]),
        growth_steps=st.sampled_from([0, 1, 4]),
        max_prompt_logits=st.sampled_from([1, 5, 2048]),
    )
    def start(
        self,
        num_blocks: int,
        num_swap_slots: int,
        cap: int,
        budget: int,
        decode_preference: float,
        starvation_bound: int,
        prefix_caching: bool,
        overlap: bool,
        windows: tuple[int | None, ...],
        start_share: float,
        growth_steps: int,
        max_prompt_logits: int,
    ) -> None:
        self.clock = FakeClock()
        self.patch = mock.patch.object(scheduler_module, "STARVATION_BOUND", starvation_bound)
        self.patch.start()
        scheduler = make_scheduler(
            num_blocks * len(windows),
            4,
            self.clock,
            num_swap_slots=num_swap_slots,
            max_num_seqs=cap,
            max_num_batched_tokens=budget,
            decode_preference=decode_preference,
            prefix_caching=prefix_caching,
            windows=windows,
            start_blocks=math.ceil(start_share * num_blocks * len(windows)),
            max_prompt_logits=max_prompt_logits,
        )
        self.simulation = Simulation(scheduler, overlap, growth_steps)
        self.accepted: dict[int, Sequence] = {}
        self.with_logprobs: set[int] = set()

    @property
    def sim(self) -> Simulation:
        assert self.simulation is not None
        return self.simulation

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        max_tokens=st.integers(0, 12),
        priority=priorities,
        forks=st.sampled_from([0, 0, 0, 1, 3]),
        seconds=st.sampled_from([math.inf, 1.0, 10.0, 100.0]),
        logprobs=st.sampled_from([False, False, True]),
        images=st.lists(st.tuples(st.integers(0, 9), st.integers(2, 12)), max_size=3),
        client=st.sampled_from("aaab"),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: Priority,
        forks: int,
        seconds: float,
        logprobs: bool = False,
        images: Iterable[tuple[int, int]] = (),
        client: str = "a",
    ) -> None:
        """Only the first of several answers to a prompt computes its log-probabilities. images: the tokens before
        each, and its own, which fit a step beside all that may decode."""
        parent, now = None, self.clock.now
        config = self.sim.scheduler.config
        spans, end = [], 0
        for before, count in () if logprobs else images:
            start, end = end + before, end + before + min(count, config.max_num_batched_tokens - config.max_num_seqs)
            spans += [(start, end)] if start < end <= len(prompt) else []
        for i in range(1 + forks):
            number, wanted = len(self.accepted) + 1, logprobs and i == 0
            seq = sequence(number, prompt, max_tokens, None, priority, now, parent, now + seconds, logprobs=wanted)
            seq.spans, seq.client = spans, client
            try:
                self.sim.add(seq)
            except PromptTooLongError:
                return
            self.accepted[number] = seq
            self.with_logprobs |= {number} if wanted else set()
            parent = parent or seq

    @rule(prefix=st.integers(0, 30), tail=st.lists(st.integers(0, 9), min_size=1, max_size=6), priority=priorities)
    def submit_with_common_prefix(self, prefix: int, tail: list[int], priority: Priority) -> None:
        self.submit([7] * prefix + tail, 5, priority, 0, 30.0)

    @precondition(lambda self: self.simulation is not None and self.sim.scheduler.has_unfinished())
    @rule(data=st.data(), max_tokens=st.integers(1, 8))
    def fork(self, data: st.DataObject, max_tokens: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.sim.unfinished, key=lambda s: s.sequence_id)))
        prompt = parent.token_ids[: parent.num_prompt_tokens]
        number = len(self.accepted) + 1
        seq = sequence(number, prompt, max_tokens, None, parent.priority, parent.arrival_time, parent)
        seq.spans, seq.client = parent.spans, parent.client
        try:
            self.sim.add(seq)
        except PromptTooLongError:
            return
        self.accepted[number] = seq

    @precondition(lambda self: self.simulation is not None and self.sim.has_work)
    @rule(steps=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.01, 3.0]))
    def step(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.clock.now += seconds
            if self.sim.has_work:
                self.sim.step()

    @rule(seconds=st.sampled_from([5.0, 10.0, 20.0, 1000.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.simulation is not None and self.sim.scheduler.has_unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        numbers = sorted(s.sequence_id for s in self.sim.unfinished)
        self.sim.abort(data.draw(st.sampled_from(numbers)))

    @precondition(lambda self: self.simulation is not None and self.sim.has_work)
    @rule(data=st.data())
    def fail_one_sequence(self, data: st.DataObject) -> None:
        self.sim.fail(lambda running: data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.simulation is not None and self.sim.has_work)
    @rule()
    def lose_the_pools_in_a_step(self) -> None:
        self.sim.fail(None)

    @precondition(lambda self: self.simulation is not None and self.sim.has_work)
    @rule(num_done=st.integers(0, 3))
    def fail_to_move(self, num_done: int) -> None:
        self.sim.fail_to_move(num_done)

    @precondition(lambda self: self.simulation is not None and self.sim.in_flight is None)
    @rule()
    def lose_the_pools(self) -> None:
        self.sim.scheduler.reset_cache()
        self.sim.slots.clear()

    @rule()
    def clear_the_cache(self) -> None:
        if self.sim.scheduler.prefix_cache is not None:
            self.sim.scheduler.prefix_cache.clear()
            assert self.sim.scheduler.pool.usage().cached == 0

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.sim.scheduler.pool.evict(count)

    @precondition(lambda self: self.simulation is not None)
    @rule(num_blocks=st.integers(1, 40))
    def shrink(self, num_blocks: int) -> None:
        self.sim.shrink(num_blocks)

    @precondition(lambda self: self.simulation is not None)
    @rule(allowed=st.booleans())
    def find_or_lose_memory_for_growth(self, allowed: bool) -> None:
        self.sim.scheduler.blocks.size.may_grow = allowed

    @invariant()
    def books_balance(self) -> None:
        if self.simulation is not None:
            self.sim.check_books()

    def teardown(self) -> None:
        if self.simulation is None:
            return
        try:
            self.end()
        finally:
            self.patch.stop()

    def end(self) -> None:
        sim = self.sim
        sim.scheduler.blocks.size.may_grow = True
        sim.run(2_000)
        assert set(sim.ended) == set(self.accepted)
        assert sim.scheduler.pool.usage().used == 0
        assert sim.scheduler.stats().swap.used == 0
        for number, seq in self.accepted.items():
            if sim.ended[number] is FinishReason.LENGTH:
                prompt = seq.token_ids[: seq.num_prompt_tokens]
                assert answer(seq) == undisturbed(prompt, number, seq.max_tokens)
                known = list(range(1, len(prompt))) if number in self.with_logprobs else []
                assert sim.logprobs.get(number, []) == known


SchedulerMachine.TestCase.settings = settings(
    max_examples=20_000 if LONG else 150,
    stateful_step_count=60 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase
