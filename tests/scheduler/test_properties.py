"""Whatever clients do, the books balance, nobody reads foreign KV, and every sequence ends exactly once."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxpaged.scheduler import FinishReason, PromptTooLongError
from tests.scheduler.simulation import Simulation, make_scheduler, sequence, unfinished


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts of two letters share prefixes often, and a small pool runs out often."""

    @initialize(
        num_blocks=st.integers(3, 24),
        cap=st.integers(1, 6),
        budget=st.integers(6, 24),
        prefix_caching=st.booleans(),
        overlap=st.booleans(),
    )
    def start(self, num_blocks: int, cap: int, budget: int, prefix_caching: bool, overlap: bool) -> None:
        self.simulation = Simulation(
            make_scheduler(
                num_blocks, 4, max_num_seqs=cap, max_num_batched_tokens=budget, prefix_caching=prefix_caching
            ),
            overlap,
        )
        self.accepted: dict[int, tuple[list[int], int]] = {}
        self.number = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40), max_tokens=st.integers(1, 12))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self.number += 1
        try:
            self.simulation.add(sequence(self.number, prompt, max_tokens))
        except PromptTooLongError:
            return
        self.accepted[self.number] = (prompt, max_tokens)

    @rule(prefix=st.integers(0, 30), tail=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def submit_with_common_prefix(self, prefix: int, tail: list[int]) -> None:
        self.submit([7] * prefix + tail, 5)

    @precondition(lambda self: self.simulation.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.simulation.has_work:
                self.simulation.step()

    @precondition(lambda self: self.simulation.scheduler.has_unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        numbers = sorted(s.sequence_id for s in unfinished(self.simulation.scheduler))
        self.simulation.abort(data.draw(st.sampled_from(numbers)))

    @precondition(lambda self: self.simulation.has_work)
    @rule(data=st.data())
    def fail_one_sequence(self, data: st.DataObject) -> None:
        self.simulation.fail(lambda running: data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.simulation.under_way is None)
    @rule()
    def lose_the_pools(self) -> None:
        self.simulation.scheduler.reset_cache()
        self.simulation.slots.clear()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.check_books()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        assert set(self.simulation.ended) == set(self.accepted)
        assert self.simulation.scheduler.pool.usage().used == 0
        assert set(self.simulation.ended.values()) <= {FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR}


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
