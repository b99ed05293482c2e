"""The rows that one step runs: a frozen record from the scheduler to the model runner, and its builder."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

from mlxpaged.scheduler.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a sequence. samples: whether these include its last token, so that the
    step samples the next one.

    restore: checkpoint of the recurrent state that the row starts from; None to go on from the sequence's own state.
    checkpoints: (position, id) of the checkpoints to take, in order. prompt_logprobs: positions of the prompt tokens
    whose log-probabilities the step computes; the logits for each are those of the token before it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    restore: int | None = None
    checkpoints: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: range = range(0)

    @property
    def context_len(self) -> int:
        """Tokens of context, including this step's."""
        return self.start + self.num_tokens

    @property
    def ends_sequence(self) -> bool:
        """Whether the sequence is complete with this row: max_tokens is 0, and these are the prompt's last tokens."""
        return self.sequence.max_tokens == 0 and self.context_len == self.sequence.num_prompt_tokens


@dataclass(frozen=True)
class BlockMoves:
    """KV blocks to move before a step runs.

    swap_out: (block, slot); copies: (source, target) blocks; swap_in: (slot, block). They run in this order, so that no
    move reads what another one has overwritten. states_out: (sequence id, slots) of recurrent states; states_in: the
    reverse.
    """

    swap_out: ListOf[tuple[int, int]] = ()
    copies: ListOf[tuple[int, int]] = ()
    swap_in: ListOf[tuple[int, int]] = ()
    states_out: ListOf[tuple[int, list[int]]] = ()
    states_in: ListOf[tuple[list[int], int]] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in or self.states_out or self.states_in)


@dataclass(frozen=True)
class Batch:
    """The rows of one forward pass: decoding sequences first, then prompt chunks.

    A row may attend to blocks that an earlier row writes. So rows that run again after a failure keep their order.
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


class ScheduleBuilder:
    """Collects the rows of the step that is being scheduled.

    preempted: ids of the sequences preempted for this step. They are not admitted again in it.
    """

    def __init__(self) -> None:
        self.rows: list[ScheduledSequence] = []
        self.preempted: set[int] = set()
        self._sequence_ids: set[int] = set()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._sequence_ids

    def add(self, sequence: Sequence, num_tokens: int, restore: int | None = None) -> None:
        """The step computes the next `num_tokens` tokens of a sequence, which has the blocks for them."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        samples = sequence.num_uncomputed_tokens == 0 and sequence.max_tokens > 0
        if samples:
            sequence.expect_token()
        logprobs = range(0)
        if sequence.logits_from is not None:
            end = min(start + num_tokens + 1, sequence.num_prompt_tokens)
            logprobs = range(max(start, sequence.logits_from) + 1, end)
        self.rows.append(ScheduledSequence(sequence, start, num_tokens, samples, restore, prompt_logprobs=logprobs))
        self._sequence_ids.add(sequence.sequence_id)

    def take_checkpoints(self, checkpoints: tuple[tuple[int, int], ...]) -> None:
        """The row that was added last takes these checkpoints."""
        if checkpoints:
            self.rows[-1] = self.rows[-1]._replace(checkpoints=checkpoints)
