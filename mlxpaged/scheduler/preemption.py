"""Preemption: which running sequences may be preempted for which, in which order, and what happens to them.

A running sequence is preempted when another one needs its blocks or its slot:
- a running sequence that grows preempts those after it in order, unless they are in the step already;
- the first waiting sequence preempts those of a lower class that are after it in order;
- a waiting sequence that has reached the starvation bound preempts any.
The last in order is preempted first. One that was admitted by the starvation bound is not preempted for a waiting
sequence: several that reached the bound would keep preempting each other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.scheduler.batch import BlockMoves, ScheduleBuilder
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

    # -- who may be preempted ------------------------------------------------------------------------------------

    def candidates(self, sequence: Sequence, starving: bool) -> list[Sequence]:
        """Running sequences that may be preempted for a waiting one, in the order in which they would be."""
        if starving:
            return [other for other in reversed(self._running) if not other.admitted_by_starvation_bound]
        return [other for other in reversed(self._running) if may_preempt(sequence, other)]

    def victims(self, sequence: Sequence, candidates: ListOf[Sequence], free_slots: int) -> list[Sequence] | None:
        """The first candidates whose preemption gives a waiting sequence a slot and enough blocks. None if preempting
        all of them would not."""
        room = self._blocks.pool.num_free - self.reserved_blocks(sequence)
        most = sum(self._reserve(other, sequence) + len(other.block_table or ()) for other in candidates)
        if self._blocks.least_room_for(sequence) > room + most:
            return None
        reuse = self._blocks.find(sequence)
        hit = {cached.block for cached in reuse.hit}  # already counted as not needed
        missing = self._blocks.room_for(sequence, reuse) - room
        dropped: Counter[int] = Counter()
        victims: list[Sequence] = []
        while missing > 0 or len(victims) + free_slots < 1:
            if len(victims) == len(candidates):
                return None
            other = candidates[len(victims)]
            assert other.block_table is not None
            victims.append(other)
            missing -= self._reserve(other, sequence)
            for block in other.block_table.block_ids:
                dropped[block] += 1
                missing -= dropped[block] == self._blocks.pool.ref_count(block) and block not in hit
        return victims

    def victim_for_growth(self, sequence: Sequence, builder: ScheduleBuilder) -> Sequence | None:
        """The running sequence to preempt next, so that `sequence` can grow. None if it is the last in order itself."""
        last = next(other for other in reversed(self._running) if other not in builder)
        return None if last is sequence else last

    def reserved_blocks(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence must leave to the running ones: for the rest of their prompts, or their
        next token."""
        return sum(self._reserve(other, sequence) for other in self._running)

    @staticmethod
    def _reserve(other: Sequence, sequence: Sequence) -> int:
        if may_preempt(sequence, other):
            return 0
        assert other.block_table is not None
        return other.block_table.blocks_missing(len(other.token_ids))

    # -- what happens to it --------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, swap: bool) -> None:
        """Put it back into the queue. swap: keep its KV in swap space if that has room. Otherwise it is recomputed,
        except for full blocks that are still in the prefix cache when it is admitted again."""
        swapped = swap and self._blocks.swap_out(sequence)
        if not swapped:
            self._blocks.release(sequence)
        self._running.remove(sequence)
        sequence.admitted_by_starvation_bound = False
        sequence.transition(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        sequence.num_preemptions += 1
        self.total += 1
        self._waiting.add(sequence)
        verb = "swapped out" if swapped else "preempted"
        logger.info("%s %s: %s", verb, sequence.label, sequence.describe_priority(self._clock()))

    # -- after a failed step: what was not written is recomputed ---------------------------------------------------

    def recompute(self, sequence: Sequence) -> list[Sequence]:
        """The KV that the steps in flight compute for a sequence, or that was moved for it, is lost. Returns the
        sequences that share such blocks: they are recomputed too."""
        if sequence.status is SequenceStatus.RUNNING:
            invalid = self._blocks.unpublish(sequence)
            self.preempt(sequence, swap=False)
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
                self.preempt(other, swap=False)
                sharing.append(other)
        return sharing

    def recompute_all(self) -> None:
        for sequence in list(self._running):
            self.preempt(sequence, swap=False)

    def undo_moves(self, moves: BlockMoves, sequences: ListOf[Sequence]) -> None:
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


def may_preempt(sequence: Sequence, other: Sequence) -> bool:
    """Whether a waiting sequence may preempt a running one because of their classes."""
    lower = other.priority > sequence.priority and other.order > sequence.order
    return lower and not other.admitted_by_starvation_bound
