"""How a running sequence loses its place: it gives way and is swapped out or computed again, or what it has computed
is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from mlxpaged.scheduler.batch import BlockMoves
from mlxpaged.scheduler.block_manager import BlockManager
from mlxpaged.scheduler.queue import SequenceQueue
from mlxpaged.scheduler.sequence import Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class Preemption:
    """Moves sequences from `running` to `waiting`, the scheduler's queues. clock: the scheduler's, seconds."""

    def __init__(
        self, blocks: BlockManager, running: SequenceQueue, waiting: SequenceQueue, clock: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._running = running
        self._waiting = waiting
        self._clock = clock
        self.total = 0

    def preempt(self, sequence: Sequence, swap: bool) -> None:
        """Back to the queue, at its place. swap: keep its values in swap space if that has room. Otherwise they are
        computed again, but for full blocks that are still found in the prefix cache when its turn comes."""
        swapped = swap and self._blocks.swap_out(sequence)
        if not swapped:
            self._blocks.release(sequence)
        self._running.remove(sequence)
        sequence.rescued = False
        sequence.transition(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        sequence.num_preemptions += 1
        self.total += 1
        self._waiting.add(sequence)
        fate = "swapped out" if swapped else "preempted"
        logger.info("%s %s: %s", fate, sequence.label, sequence.standing(self._clock()))

    def start_over(self, sequence: Sequence) -> list[Sequence]:
        """What a sequence has computed in the steps under way, or what was moved for it, is lost: it is computed again.
        So are those that had adopted blocks from it, which are returned."""
        if sequence.status is SequenceStatus.RUNNING:
            tainted = self._blocks.retract(sequence)
            self.preempt(sequence, swap=False)
            return self.void_dependants(tainted)
        if sequence.status is SequenceStatus.SWAPPED:
            self._lose_swapped(sequence)
        return []

    def start_all_over(self) -> None:
        """Of those that run."""
        for sequence in list(self._running):
            self.preempt(sequence, swap=False)

    def void_dependants(self, tainted: set[int]) -> list[Sequence]:
        """Preempts those that run and have adopted one of these blocks, or one from such a sequence."""
        dependants = []
        for other in list(self._running):
            assert other.block_table is not None
            if not tainted.isdisjoint(other.block_table.block_ids):
                tainted |= self._blocks.retract(other)
                self.preempt(other, swap=False)
                dependants.append(other)
        return dependants

    def undo_moves(self, moves: BlockMoves, sequences: Iterable[Sequence]) -> None:
        """The moves failed, wholly or in part: those of `sequences` that need them start over."""
        slots = {slot for _, slot in moves.swap_out}
        blocks = {block for _, block in (*moves.copies, *moves.swap_in)}
        for sequence in sequences:
            table = sequence.block_table
            if not slots.isdisjoint(sequence.swap_slots):
                self._lose_swapped(sequence)
            elif table is not None and not blocks.isdisjoint(table.block_ids):
                sequence.num_committed_tokens = 0
                self.start_over(sequence)

    def _lose_swapped(self, sequence: Sequence) -> None:
        sequence.transition(SequenceStatus.PREEMPTED)
        self._blocks.drop_swapped(sequence)
