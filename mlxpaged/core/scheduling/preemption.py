"""Decides which running sequences are preempted, for which sequence, and in which order. Recomputes after failures.

A running sequence is preempted when another one needs its blocks or its slot:
- A running sequence that grows preempts those after it in order, unless they are in the step already.
- The first waiting sequence preempts those of a lower class that are after it in order.
- A waiting sequence that has reached the starvation bound preempts any.
- A waiting sequence of a client that is shut out preempts those of clients that have several.
The last in order is preempted first. A sequence that was admitted by one of the two bounds is not preempted for a
waiting one: several sequences that reached a bound would keep preempting each other.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from mlxpaged.core.scheduling.block_manager import BlockManager
from mlxpaged.core.scheduling.queue import SequenceQueue, WaitingQueue
from mlxpaged.core.scheduling.schedule_builder import ScheduleBuilder
from mlxpaged.core.scheduling.sequence import Sequence, SequenceStatus
from mlxpaged.core.step import BlockMoves

logger = logging.getLogger(__name__)


@dataclass
class Preemption:
    """Moves sequences from `running` to `waiting`, the scheduler's queues. clock: seconds, as the scheduler's."""

    blocks: BlockManager
    running: SequenceQueue
    waiting: WaitingQueue
    clock: Callable[[], float]
    total: int = 0

    def candidates(self, sequence: Sequence, starving: bool) -> list[Sequence]:
        """Running sequences that may be preempted for a waiting one, the first to be preempted first."""
        if starving:
            return [other for other in reversed(self.running) if not other.admitted_by_starvation_bound]
        return [other for other in reversed(self.running) if may_preempt(sequence, other)]

    def candidates_of_others(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that may be preempted for one of a client that has none running, the first to be preempted
        first: those of its class and lower ones, of the client that has most blocks then. Each client keeps the first
        one of its own, so that it gets on."""
        of_client = defaultdict[str, list[Sequence]](list)
        for other in self.running:
            of_client[other.client].append(other)
        blocks = {client: sum(map(num_blocks, others)) for client, others in of_client.items()}
        found: list[Sequence] = []
        while several := [client for client, others in of_client.items() if len(others) > 1]:
            client = max(several, key=blocks.__getitem__)
            other = of_client[client].pop()
            blocks[client] -= num_blocks(other)
            if other.priority >= sequence.priority and not other.admitted_by_starvation_bound:
                found.append(other)
        return found

    def victims(self, sequence: Sequence, candidates: ListOf[Sequence], free_slots: int) -> list[Sequence] | None:
        """The first candidates whose preemption gives a waiting sequence a slot and enough blocks. None if preempting
        all candidates would not be enough."""
        room = self.blocks.pool.num_free - self.reserved_blocks(sequence)
        most = sum(self._reserve(other, sequence) + len(other.kv.table or ()) for other in candidates)
        if self.blocks.least_room_for(sequence) > room + most:
            return None
        reuse = self.blocks.find(sequence).without_copy
        hit = {
            block for _, block in self.blocks.found_blocks(reuse)
        }  # `room_for` has already counted them as available
        missing = self.blocks.room_for(sequence, reuse) - room
        dropped: Counter[int] = Counter()
        victims: list[Sequence] = []
        while missing > 0 or len(victims) + free_slots < 1:
            if len(victims) == len(candidates):
                return None
            other = candidates[len(victims)]
            assert other.kv.table is not None
            victims.append(other)
            missing -= self._reserve(other, sequence)
            for block in other.kv.table.block_ids:
                dropped[block] += 1
                missing -= dropped[block] == self.blocks.pool.ref_count(block) and block not in hit
        return victims

    def victim_for_growth(self, sequence: Sequence, builder: ScheduleBuilder) -> Sequence | None:
        """The running sequence to preempt next so that `sequence` can grow. None if `sequence` itself is the last. The
        only one of a client is not preempted for another client that has several, unless its class is lower."""
        last = next(other for other in reversed(self.running) if other not in builder)
        counts = Counter(other.client for other in self.running)
        is_only = last.client != sequence.client and counts[last.client] == 1 < counts[sequence.client]
        if is_only and last.priority <= sequence.priority:
            own = (other for other in reversed(self.running) if other.client == sequence.client)
            last = next(other for other in own if other not in builder)
        return None if last is sequence else last

    def reserved_blocks(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence must leave to the running ones, for the rest of their prompts or their
        next token."""
        return sum(self._reserve(other, sequence) for other in self.running)

    def _reserve(self, other: Sequence, sequence: Sequence) -> int:
        return 0 if may_preempt(sequence, other) else self.blocks.room_left_for(other)

    def preempt(self, sequence: Sequence, swap: bool) -> None:
        """Move a running sequence to the waiting queue. swap: keep its KV in swap space if there is room. Otherwise it
        is recomputed, except for full blocks that are still in the prefix cache when it is admitted again."""
        swapped = swap and self.blocks.swap_out(sequence)
        if not swapped:
            self.blocks.release(sequence)
        self.running.remove(sequence)
        sequence.admitted_by_starvation_bound = False
        sequence.transition(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        sequence.num_preemptions += 1
        self.total += 1
        self.waiting.add(sequence)
        verb = "swapped out" if swapped else "preempted"
        logger.info("%s %s: %s", verb, sequence.label, sequence.describe_priority(self.clock()))

    def recompute(self, sequence: Sequence) -> None:
        """Discard the KV of a sequence that the steps in flight compute or move. Sequences that share such blocks are
        recomputed too."""
        if sequence.status is SequenceStatus.RUNNING:
            invalid = self.blocks.unpublish(sequence)
            self.preempt(sequence, swap=False)
            self.recompute_sharing(invalid)
        elif sequence.status is SequenceStatus.SWAPPED:
            self._lose_swapped(sequence)

    def recompute_sharing(self, invalid: set[int]) -> list[Sequence]:
        """Recompute the running sequences that have one of these blocks, or that share a block with such a sequence.
        Returns the recomputed sequences."""
        preempted = []
        for other in list(self.running):
            assert other.kv.table is not None
            if not invalid.isdisjoint(other.kv.table.block_ids):
                invalid |= self.blocks.unpublish(other)
                self.preempt(other, swap=False)
                preempted.append(other)
        return preempted

    def undo_moves(self, moves: BlockMoves, sequences: ListOf[Sequence]) -> None:
        """Recompute those of `sequences` that need the given moves, because the moves failed at least in part."""
        slots = {slot for _, slot in moves.swap_out} | {slot for _, _, slots in moves.states_out for slot in slots}
        loaded = {sequence_id for _, sequence_id in moves.states_in}
        blocks = {block for _, block in (*moves.copies, *moves.swap_in)}
        for sequence in sequences:
            table = sequence.kv.table
            if not slots.isdisjoint([*sequence.kv.swap_slots, *sequence.kv.state_slots]):
                self._lose_swapped(sequence)
            elif table is not None and (sequence.sequence_id in loaded or not blocks.isdisjoint(table.block_ids)):
                sequence.num_committed_tokens = 0
                self.recompute(sequence)

    def _lose_swapped(self, sequence: Sequence) -> None:
        sequence.transition(SequenceStatus.PREEMPTED)
        self.blocks.drop_swapped(sequence)


def num_blocks(sequence: Sequence) -> int:
    return len(sequence.kv.table or ())


def may_preempt(sequence: Sequence, other: Sequence) -> bool:
    """Whether a waiting sequence may preempt a running one because of their classes."""
    lower = other.priority > sequence.priority and other.order > sequence.order
    return lower and not other.admitted_by_starvation_bound
