"""What one step runs: a frozen record handed from the scheduler to the model runner."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

from mlxpaged.scheduler.sequence import Sequence
from mlxpaged.scheduler.step_cost import Costs

LEAST_CHUNK = 32
"""Tokens of a prompt in a step, however long that takes."""


class ScheduledSequence(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a sequence; `samples` where the last of them is its last token."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def context_len(self) -> int:
        """Tokens of context once this step's tokens are written, these included."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class BlockMoves:
    """KV blocks to be moved before a step runs: out to swap slots, then copied within the pool, then in from slots.

    swap_out: (block, slot); copies: (source, target) blocks; swap_in: (slot, block). In this order no move reads what
    another one has overwritten.
    """

    swap_out: ListOf[tuple[int, int]] = ()
    copies: ListOf[tuple[int, int]] = ()
    swap_in: ListOf[tuple[int, int]] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)


@dataclass(frozen=True)
class Batch:
    """The rows of one forward pass: decoding sequences first, then prompt chunks.

    The order matters within the step too: a sequence may attend to blocks that an earlier one writes in the same step.
    """

    rows: ListOf[ScheduledSequence]
    moves: BlockMoves = BlockMoves()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def sequence_ids(self) -> list[int]:
        return [row.sequence.sequence_id for row in self.rows]


class StepPlan:
    """The rows of the step that is being made up, and what is left of its token budget.

    gave_way: who was preempted for it, and does not come back in it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[ScheduledSequence] = []
        self.gave_way: set[int] = set()
        self._sequence_ids: set[int] = set()
        self._costs: Costs | None = None
        self._seconds = 0.0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._sequence_ids

    def limit(self, costs: Costs, seconds: float) -> None:
        """From here on, chunks of prompts may take this long, by these costs. One that is cut short ends the step."""
        self._costs, self._seconds = costs, seconds

    def chunk_of(self, sequence: Sequence) -> int:
        """Tokens of a prompt that the step can take now: some at least, or the prompt would never come to its end."""
        tokens = min(self.budget, sequence.num_uncomputed_tokens)
        if self._costs is None:
            return tokens
        return min(tokens, max(LEAST_CHUNK, self._costs.chunk_within(self._seconds, sequence.num_computed_tokens)))

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        samples = start + num_tokens == len(sequence.token_ids)
        if samples:
            sequence.expect_token()
        self.rows.append(ScheduledSequence(sequence, start, num_tokens, samples))
        self._sequence_ids.add(sequence.sequence_id)
        self.budget -= num_tokens
        if self._costs is not None:
            self._seconds -= self._costs.chunk_seconds(start, num_tokens)
            if self._seconds <= 0 or not samples:
                self.budget = 0
