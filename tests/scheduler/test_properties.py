"""Whatever clients do, the books balance, nobody reads foreign KV, and every sequence ends exactly once."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxpaged.scheduler import FinishReason, PromptTooLongError
from tests.scheduler.simulation import Simulation, make_scheduler, next_token, sequence, unfinished


class SchedulerMachine(RuleBasedStateMachine):
    """Prompts of two letters share prefixes often, and a small pool runs out often."""

    @initialize(
        num_blocks=st.integers(3, 24),
        cap=st.integers(1, 6),
        budget=st.integers(6, 24),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks: int, cap: int, budget: int, prefix_caching: bool) -> None:
        self.simulation = Simulation(
            make_scheduler(
                num_blocks, 4, max_num_seqs=cap, max_num_batched_tokens=budget, prefix_caching=prefix_caching
            )
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

    @precondition(lambda self: self.simulation.scheduler.has_unfinished())
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.simulation.scheduler.has_unfinished():
                assert self.simulation.step().rows

    @precondition(lambda self: self.simulation.scheduler.has_unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        numbers = sorted(s.sequence_id for s in unfinished(self.simulation.scheduler))
        self.simulation.abort(data.draw(st.sampled_from(numbers)))

    @precondition(lambda self: self.simulation.scheduler.has_unfinished())
    @rule(data=st.data())
    def fail_one_row(self, data: st.DataObject) -> None:
        """The step that fails writes nothing for its culprit; the others of the batch are run as the engine would."""
        scheduler = self.simulation.scheduler
        batch = scheduler.schedule()
        culprit = data.draw(st.sampled_from(list(batch.rows)))
        scheduler.fail(batch, culprit)
        self.simulation.note_end(culprit.sequence)
        alive = [row for row in batch.rows if row.sequence.block_table is not None]
        for row in alive:
            assert row.sequence.block_table is not None
            for position in range(row.start, row.context_len):
                slot = (row.sequence.block_table.block_ids[position // 4], position % 4)
                self.simulation.slots[slot] = tuple(row.sequence.token_ids[: position + 1])
        tokens = {row.sequence.sequence_id: next_token(row.sequence) for row in alive if row.samples}
        for ended in scheduler.update(batch, tokens):
            self.simulation.note_end(ended)

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
