"""After a failed step: sequences whose KV was not written are recomputed."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpaged.scheduler.batch import BlockMoves
from mlxpaged.scheduler.block_manager import BlockManager
from mlxpaged.scheduler.preemption import Preemption
from mlxpaged.scheduler.queue import SequenceQueue
from mlxpaged.scheduler.sequence import Sequence, SequenceStatus


class Recovery:
    """Preempts running sequences without swapping, so that they are recomputed when they are admitted again."""

    def __init__(self, blocks: BlockManager, running: SequenceQueue, preemption: Preemption) -> None:
        self._blocks = blocks
        self._running = running
        self._preemption = preemption

    def recompute(self, sequence: Sequence) -> list[Sequence]:
        """The KV that the steps in flight compute for a sequence, or that was moved for it, is lost. Returns the
        sequences that share such blocks: they are recomputed too."""
        if sequence.status is SequenceStatus.RUNNING:
            invalid = self._blocks.unpublish(sequence)
            self._preemption.preempt(sequence, swap=False)
            return self.recompute_sharing(invalid)
        if sequence.status is SequenceStatus.SWAPPED:
            self._lose_swapped(sequence)
        return []

    def recompute_sharing(self, invalid: set[int]) -> list[Sequence]:
        """Recompute the running sequences that have one of these blocks, or a block of such a sequence."""
        sharing = []
        for other in list(self._running):
            assert other.block_table is not None
            if not invalid.isdisjoint(other.block_table.block_ids):
                invalid |= self._blocks.unpublish(other)
                self._preemption.preempt(other, swap=False)
                sharing.append(other)
        return sharing

    def undo_moves(self, moves: BlockMoves, sequences: Iterable[Sequence]) -> None:
        """The moves failed, wholly or in part: recompute those of `sequences` that need them."""
        slots = {slot for _, slot in moves.swap_out}
        blocks = {block for _, block in (*moves.copies, *moves.swap_in)}
        for sequence in sequences:
            table = sequence.block_table
            if not slots.isdisjoint(sequence.swap_slots):
                self._lose_swapped(sequence)
            elif table is not None and not blocks.isdisjoint(table.block_ids):
                sequence.num_committed_tokens = 0
                self.recompute(sequence)

    def _lose_swapped(self, sequence: Sequence) -> None:
        sequence.transition(SequenceStatus.PREEMPTED)
        self._blocks.drop_swapped(sequence)
