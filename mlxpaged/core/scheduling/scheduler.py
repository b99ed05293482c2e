"""The scheduler. In every step it picks the tokens to run, within a token budget and the free blocks.

Decoding sequences come first, one token each. Chunks of running and waiting prompts share the rest of the token budget,
in the order that queue.py defines.

The blocks of a prompt can be shared as soon as the step that computes them is scheduled. Before every chunk, a running
prompt adopts blocks that other sequences have computed for it. So a shared prefix is never computed twice.

When blocks run out, the pool grows (pool_size.py). If it cannot, unused cached blocks are evicted first, then running
sequences are preempted (preemption.py). A sequence is accepted only if it could run alone in the largest pool, so the
first in order can continue as soon as the pool has grown.

A step may be scheduled while the previous one is in flight: PENDING stands for a token that is not known yet. The
device runs the steps in order, so blocks may change owners at once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple

from mlxpaged.core.blocks.block_pool import OutOfBlocksError
from mlxpaged.core.blocks.prefix_cache import CachedBlock, value
from mlxpaged.core.blocks.table_rows import IntArray
from mlxpaged.core.scheduling.admission import AdmissionControl, check_fits
from mlxpaged.core.scheduling.block_manager import BlockManager
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.preemption import Preemption
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.core.scheduling.queue import ORDER, SequenceQueue, WaitingQueue, short_first
from mlxpaged.core.scheduling.schedule_builder import ScheduleBuilder
from mlxpaged.core.scheduling.sequence import AGING_RATE, FinishReason, Sequence, SequenceStatus
from mlxpaged.core.scheduling.shut_out import ShutOut
from mlxpaged.core.scheduling.stats import SchedulerStats
from mlxpaged.core.scheduling.wait import Wait
from mlxpaged.core.step import Row, Step

logger = logging.getLogger(__name__)

STARVATION_BOUND = 64
"""A waiting sequence that had no room in this many steps in a row may preempt running ones of any class."""

LOOK_AHEAD = 4
"""A step stops admitting after this many waiting sequences without room. So a small one may overtake a large one. Those
that need a larger pool do not count while it cannot grow."""


class Prefill(NamedTuple):
    """The tokens of a sequence that are left to compute, and the least seconds that they take."""

    num_tokens: int
    seconds: float


class Scheduler:
    """Holds every unfinished sequence. `schedule` starts a step, `update` ends it; all calls come from one thread.

    clock: seconds. The sequences' arrival times and deadlines refer to it. times: learns how long steps take, and
    limits their prompts by that.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.blocks = BlockManager(config)
        self.pool = self.blocks.pool
        self.prefix_cache = self.blocks.prefix_cache
        self.clock = clock
        self.sequences: dict[int, Sequence] = {}  # all unfinished ones, by id
        self._arrivals = itertools.count()
        self.running = SequenceQueue()
        self.waiting = WaitingQueue(self._num_left)
        self._forks: dict[int, list[Sequence]] = {}  # by parent: forks that wait until its prompt is computed
        self.held = defaultdict[Wait, dict[int, Sequence]](dict)  # by what they wait for first, and by id
        self.valuable_seconds = math.inf  # a prefix that takes longer to compute is worth storing
        self._changed: set[int] = set()  # sequences whose blocks get their contents in the step being scheduled
        self._preemption = Preemption(self.blocks, self.running, self.waiting, clock)
        self._shut_out = ShutOut(self.running, self.waiting, self.sequences)
        self._admission = AdmissionControl(config.max_num_seqs, self._preemption, self._changed)
        self.times = PrefillLimits(config)
        self.max_tokens = config.max_num_batched_tokens
        self.admits = True  # whether waiting sequences are admitted while others run, and drafts verified
        self._starvation_admissions = self._prefix_hit_tokens = self._prompt_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def limit_tokens(self, num_tokens: int) -> None:
        """Set the token budget of the next step: less than usual if memory is short. Decoding sequences are in it all
        the same."""
        self.max_tokens = num_tokens

    def add(self, sequence: Sequence, waits: ListOf[Wait] = ()) -> None:
        """Queue a sequence; a fork is queued once its parent's prompt is computed. waits: what it waits for, one after
        the other; the last `release` queues it. Raises PromptTooLongError if the sequence could never run."""
        check_fits(sequence.num_prompt_tokens, sequence.max_tokens, self.config)
        if sequence.sequence_id in self.sequences:
            raise ValueError(f"sequence {sequence.sequence_id} is already queued")
        self.sequences[sequence.sequence_id] = sequence
        self.blocks.states.add(sequence)
        sequence.arrival_number = next(self._arrivals)
        sequence.order = (sequence.priority + AGING_RATE * sequence.arrival_time, sequence.arrival_number)
        parent = sequence.fork_of
        if parent is not None and parent.sequence_id in self.sequences and parent.num_output_tokens == 0:
            self._forks.setdefault(parent.sequence_id, []).append(sequence)
        else:
            sequence.waits = list(waits)
            self._queue(sequence)

    def release(self, sequence_id: int) -> None:
        """The sequence has what it waited for first. It is queued if it waits for nothing else."""
        sequence = self.sequences[sequence_id]
        del self.held[sequence.waits.pop(0)][sequence_id]
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        if sequence.waits:
            self.held[sequence.waits[0]][sequence.sequence_id] = sequence
        else:
            self.waiting.add(sequence)

    def finish(self, sequence_id: int, reason: FinishReason) -> Sequence:
        """End a sequence in any state and release all that it holds. Raises KeyError if it has already ended."""
        sequence = self.sequences[sequence_id]
        siblings = self._forks.get(sequence.fork_of.sequence_id, []) if sequence.fork_of is not None else []
        if sequence in siblings:
            siblings.remove(sequence)
        elif sequence.waits:
            del self.held[sequence.waits[0]][sequence_id]
        else:
            (self.running if sequence.status is SequenceStatus.RUNNING else self.waiting).remove(sequence)
        self._queue_forks(sequence)
        if sequence.kv.table is not None and reason not in (FinishReason.ERROR, FinishReason.MEMORY):
            self._value(sequence.kv.table.chain)
            self.blocks.publish_partial(sequence)
        sequence.transition(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self.blocks.release(sequence)
        self.blocks.states.remove(sequence)
        del self.sequences[sequence_id]
        return sequence

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    @property
    def num_runnable(self) -> int:
        """Sequences that wait for nothing but room, or run."""
        return len(self.running) + len(self.waiting)

    def too_large_for_pool(self) -> list[int]:
        """Ids of the sequences that could not run on even alone in the pool as large as it is now."""
        if self.blocks.size.num_blocks == self.blocks.size.limit:
            return []
        running = (each for each in self.running if self.blocks.outgrows_pool(each, 1))
        waiting = (each for each in self.waiting if not self.blocks.can_hold(each))
        return [each.sequence_id for each in itertools.chain(running, waiting)]

    def _value(self, chain: ListOf[CachedBlock]) -> None:
        """Mark a prefix if it takes long to compute."""
        if self.valuable_seconds < math.inf:
            chain = chain[: self.blocks.states.usable(chain)]
            seconds = self.times.seconds_roughly(0, len(chain) * self.config.block_size)
            if seconds is not None and seconds > self.valuable_seconds:
                value(chain)

    def room_beside(self, sequence: Sequence) -> int:
        """Free blocks that the running sequences leave to one that is to wait for admission."""
        return self.pool.num_free - self._preemption.reserved_blocks(sequence)

    def prefill_beyond(self, sequence: Sequence, seconds: float) -> Prefill | None:
        """Return what is left to compute before the next token of a sequence, if that takes more than `seconds` even
        with the device to itself. None if it may take less, or if too few prompts were computed to estimate it.

        A fork reuses what its parent computes, so the parent's tokens are counted."""
        if sequence.fork_of is not None and sequence.fork_of.sequence_id in self.sequences:
            sequence = sequence.fork_of
        if any(wait.brings_prefix for wait in sequence.waits):
            return None
        length = len(sequence.token_ids)
        start = max(sequence.num_computed_tokens, sequence.kv.num_swapped_tokens)
        if length - start <= 1 or self.times.seconds_alone(start, length - start) <= seconds:
            return None  # without searching the prefix cache, which takes long for long prompts
        start = self.blocks.num_available_tokens(sequence)
        needed = self.times.seconds_alone(start, length - start)
        return Prefill(length - start, needed) if needed > seconds else None

    def pause_admission(self) -> None:
        """An allocation has failed: admit no sequence while others run, and verify no drafts."""
        self.admits = False

    def resume_admission(self) -> None:
        """A step has succeeded."""
        self.admits = True

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        """Choose the next step's tokens and take the blocks that they need. Pass every step to `update`; at most one
        more may be scheduled before that. It is empty only if no sequence is unfinished, or all wait for `update`."""
        builder = ScheduleBuilder()
        self._changed.clear()
        self.blocks.size.forget_asked()
        self.blocks.give_back(self.running)
        self._shut_out.find()
        self._preempt_for_waiting(builder)
        self._add_decodes(builder)
        self._add_prompts(builder)
        self.blocks.size.relieve()
        return Step(builder.build(self.tables_of), self.blocks.take_moves())

    def update(self, step: Step, token_ids: Mapping[int, ListOf[int]]) -> None:
        """Commit a step that the device has finished, with the tokens that it sampled, by sequence id. The engine
        decides which answers end with them, and calls `finish` for those.

        A row may have fewer tokens than it sampled: the others were rejected, and as many of the row's last tokens are
        taken back with them. Sequences that ended since `schedule` are ignored. Preempted ones without tokens here
        sample them again later.
        """
        for row in step.rows:
            sequence = self.sequences.get(row.sequence_id)
            if sequence is None:
                continue
            sampled = token_ids.get(row.sequence_id, ())
            is_running = sequence.status is SequenceStatus.RUNNING
            if is_running:
                sequence.num_committed_tokens = row.start + len(row.token_ids)
                self.blocks.commit(sequence, row.start, sequence.num_committed_tokens)
            elif not sampled:
                sequence.drop_pending_tokens()
                continue
            if row.num_sampled:
                sequence.fill_tokens(sampled)
                if len(sampled) < row.num_sampled:
                    sequence.take_back(row.num_sampled - len(sampled))
                if self._forks:
                    self._queue_forks(sequence)
                if is_running:  # the last token may fill a block that the step in flight computes
                    self.blocks.publish(sequence)

    def running_rows(self, rows: ListOf[Row]) -> list[Row]:
        """Those rows whose sequences still run."""
        running = {sequence.sequence_id for sequence in self.running}
        return [row for row in rows if row.sequence_id in running]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self.running),
            waiting=len(self.sequences) - len(self.running),
            blocks=self.pool.usage(),
            max_blocks=self.config.num_blocks,
            swap=self.blocks.swap.usage(),
            checkpoints=len(self.blocks.states.checkpoints),
            max_checkpoints=self.blocks.states.checkpoints.capacity,
            preemptions_total=self._preemption.total,
            starvation_admissions_total=self._starvation_admissions,
            blocks_copied_total=self.blocks.blocks_copied,
            blocks_swapped_out_total=self.blocks.blocks_swapped_out,
            blocks_swapped_in_total=self.blocks.blocks_swapped_in,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            prompt_tokens_total=self._prompt_tokens,
        )

    def shrink(self, num_blocks: int, moves: Mapping[int, int]) -> None:
        """The pool has only `num_blocks` blocks from now on, and these copies were made: source to target, as
        `pool.moves_to` returned them. No step may be in flight, because it would use the old blocks."""
        if self.prefix_cache is not None:
            self.prefix_cache.rename(moves)
        for sequence in self.running:
            if sequence.kv.table is not None:
                sequence.kv.table.rename(moves)
        self.pool.shrink(num_blocks, moves)

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, sequence_id: int, reason: FinishReason = FinishReason.ERROR) -> list[Sequence]:
        """End a sequence whose step failed, and unpublish the blocks that the steps in flight write for it. Sequences
        that share these blocks are preempted and recomputed. Returns them."""
        sequence = self.sequences[sequence_id]
        invalid = self.blocks.unpublish(sequence)
        self.finish(sequence_id, reason)
        preempted = self._preemption.recompute_sharing(invalid)
        for other in preempted:
            other.drop_pending_tokens()
        return preempted

    def recompute(self, sequence: Sequence) -> None:
        """Discard what the steps in flight compute for a sequence. Sequences that share it are recomputed too."""
        self._preemption.recompute(sequence)

    def undo_moves(self, step: Step) -> None:
        """Recompute the sequences that need the moves of a step, because these failed at least in part. The previous
        step may still be in flight: it did not fail, and its tokens will be read."""
        self._preemption.undo_moves(step.moves, list(self.sequences.values()))

    def clear_cache(self) -> int:
        """Empty the prefix cache. Running sequences keep their blocks. Returns the number of blocks that it held."""
        if self.prefix_cache is None:
            return 0
        dropped = len(self.prefix_cache)
        self.prefix_cache.clear()
        return dropped

    def reset_cache(self) -> None:
        """Recompute the running sequences and empty the prefix cache, because the pool's contents are lost."""
        for sequence in list(self.running):
            self._preemption.preempt(sequence, swap=False)
        self.clear_cache()

    def _num_left(self, sequence: Sequence) -> int:
        """Tokens of a sequence that waits which are not in the prefix cache, in swap space, or its parent's."""
        if sequence.fork_of is not None and sequence.fork_of.sequence_id in self.sequences:
            return 1
        return len(sequence.token_ids) - self.blocks.num_available_tokens(sequence)

    # -- decoding and prompts ------------------------------------------------------------------------------------

    def _add_decodes(self, builder: ScheduleBuilder) -> None:
        decoding = list(filter(is_decoding, self.running))
        reserved = len(decoding) * len(self.blocks.groups)  # for the next tokens of the others
        # Half of the logits is left to prompts, so that no stream of drafts keeps one waiting.
        most = min(self.max_tokens - len(decoding), self.config.max_prompt_logits // 2) if self.admits else 0
        for sequence in decoding:
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence, 1, builder):
                drafts, sequence.drafts = sequence.drafts[: max(0, most)], ()
                if drafts:
                    room = self.blocks.states.most_drafts(sequence, len(drafts))
                    drafts = drafts[: self.blocks.grow_for_drafts(sequence, room, reserved)]
                    most -= len(drafts)
                self._add(builder, sequence, 1, drafts)
        if self.config.recurrent and builder.num_drafts:
            builder.sort_by_length()

    def _add_prompts(self, builder: ScheduleBuilder) -> None:
        """Add chunks of running and waiting prompts, in order, and of a class the short ones first. Stop at a running
        prompt without enough blocks: the next ones would take the blocks that it waits for."""
        prefilling = [sequence for sequence in self.running if sequence.num_uncomputed_tokens > 1]
        waiting = self._first_waiting(self._admission.num_free_slots + LOOK_AHEAD)
        shut_out = [each for each in self._shut_out.first if each.status is not SequenceStatus.RUNNING]
        if further := [each for each in shut_out if each not in waiting]:
            waiting = sorted([*waiting, *further], key=ORDER)
        if not prefilling and not waiting:
            self.times.forget()
            return
        without_room = [len(sequence.token_ids) for sequence in filter(is_decoding, self.running)]
        num_prompts = len(prefilling) + len(waiting)
        logits = self.config.max_prompt_logits - builder.num_drafts
        delayed = builder.first_contexts or without_room
        budget = self.times.budget(builder.contexts, delayed, self.max_tokens, logits, num_prompts)
        refused = 0
        for sequence in short_first(heapq.merge(prefilling, waiting, key=ORDER)):
            if budget.tokens <= 0:
                return
            if not budget.has_room(sequence):
                continue
            if sequence.status is SequenceStatus.RUNNING:
                if shared := self.blocks.catch_up(sequence):
                    sequence.num_computed_tokens = shared
                    self._changed.add(sequence.sequence_id)
                num_tokens = budget.take_chunk(sequence)
                if not self._grow(sequence, num_tokens, builder):
                    return
                if num_tokens:
                    self._add(builder, sequence, num_tokens)
            elif (
                (refused >= LOOK_AHEAD and sequence not in shut_out)
                or sequence.sequence_id in builder.preempted
                or self._admits_none()
            ):
                continue
            elif self._admit(sequence):
                num_tokens = budget.take_chunk(sequence)
                self.blocks.grow(sequence, num_tokens)
                if num_tokens:
                    self._add(builder, sequence, num_tokens)
            else:
                refused += not self._waits_for_growth(sequence)

    def _add(self, builder: ScheduleBuilder, sequence: Sequence, num_tokens: int, drafts: ListOf[int] = ()) -> None:
        start, restore = sequence.num_computed_tokens, self.blocks.states.take_restore(sequence)
        num_sampled = sequence.compute(num_tokens, len(drafts))
        self.blocks.publish(sequence)
        # A row with drafts takes none: a rejected draft would leave a checkpoint of another state.
        checkpoints = self.blocks.states.take_checkpoints(sequence, start, 0 if drafts else num_tokens)
        builder.add(sequence, start, num_sampled, restore, checkpoints, drafts)

    def tables_of(self, sequences: Iterable[Sequence]) -> IntArray:
        """Block ids [n, G, b] of n sequences for each cache group; entries without a block are UNUSED."""
        tables = [sequence.kv.table for sequence in sequences]
        numbers = [number for table in tables if table is not None for number in table.row_numbers]
        return self.blocks.tables.select(numbers).reshape(len(tables), len(self.blocks.groups), -1)

    def _grow(self, sequence: Sequence, num_tokens: int, builder: ScheduleBuilder) -> bool:
        """Take blocks for the next `num_tokens` tokens, and preempt other sequences if needed. Returns False if that is
        not enough, or if the pool grows instead: the sequence keeps its blocks and skips the step. If it has outgrown a
        pool that cannot grow, it is preempted itself, unless no other sequence can run."""
        while True:
            try:
                self.blocks.grow(sequence, num_tokens)
                return True
            except OutOfBlocksError:
                if self.blocks.size.can_grow:
                    return False
                if self.blocks.outgrows_pool(sequence, num_tokens):
                    if len(self.running) > 1 or any(map(self.blocks.can_hold, self.waiting)):
                        self._preempt(sequence, builder)
                    return False
                victim = self._preemption.victim_for_growth(sequence, builder)
                if victim is None:
                    return False
                self._preempt(victim, builder)

    # -- admission and preemption --------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to RUNNING if there is a slot and room for it."""
        reuse = self._admission.find_room(sequence)
        if reuse is None:
            sequence.skipped_steps += self._admission.num_free_slots > 0
            return False
        first_time = sequence.status is SequenceStatus.WAITING
        self.waiting.remove(sequence)
        sequence.transition(SequenceStatus.RUNNING)
        sequence.num_computed_tokens = sequence.num_committed_tokens = self.blocks.start(sequence, reuse)
        sequence.skipped_steps = sequence.steps_shut_out = 0
        self.running.add(sequence)
        self._changed.add(sequence.sequence_id)
        if first_time:
            # One that goes on with its answer may find a part of that too.
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            self._prefix_hit_tokens += sequence.num_cached_tokens
            self._prompt_tokens += sequence.num_prompt_tokens
        logger.debug("admitted %s: %s", sequence.label, sequence.describe_priority(self.clock()))
        if reuse.hit:
            blocks = len(reuse.hit)
            count = max((self.pool.ref_count(block) for _, block in self.blocks.found_blocks(reuse)), default=0)
            message = "%s: prefix_hit=true, %d blocks (%d tokens), reference counts up to %d"
            logger.debug(message, sequence.label, blocks, blocks * self.config.block_size, count)
        return True

    def _preempt_for_waiting(self, builder: ScheduleBuilder) -> None:
        """Admit one waiting sequence, and preempt running ones for it if it may: the first that has reached the
        starvation bound, or else the first that was shut out for too long, or else the first in order."""
        if self._admits_none():
            return
        first = [each for each in self._first_waiting(LOOK_AHEAD) if not self._waits_for_growth(each)]
        overdue = [each for each in self._shut_out.overdue if not self._waits_for_growth(each)]
        starving = next((each for each in (*overdue, *first) if each.skipped_steps >= STARVATION_BOUND), None)
        if starving is None:
            for each in overdue:
                others = self._preemption.candidates_of_others(each)
                if self._admit_by_preempting(each, others, builder) is not None:
                    each.admitted_by_starvation_bound = True
                    logger.info("admitted %s: its client had none running", each.label)
                    return
        else:  # others are preempted in any case; for those that are shut out it is their turn
            starving = next((each for each in overdue if each.priority <= starving.priority), starving)
        sequence = starving or next(iter(first), None)
        if sequence is None:
            return
        candidates = self._preemption.candidates(sequence, starving is not None)
        if not candidates and not starving:
            return
        victims = self._admit_by_preempting(sequence, candidates, builder)
        if starving and victims is not None:
            sequence.admitted_by_starvation_bound = True
            if victims:
                self._starvation_admissions += 1
                message = "preempted sequences for %s, which reached the starvation bound: %s"
                logger.info(message, sequence.label, sequence.describe_priority(self.clock()))

    def _admit_by_preempting(
        self, sequence: Sequence, candidates: ListOf[Sequence], builder: ScheduleBuilder
    ) -> ListOf[Sequence] | None:
        """Admit a waiting sequence, and preempt those of the candidates that its room needs. Returns them. None if it
        waits: for the pool to grow, or because all of them are not enough."""
        has_room = self._admission.find_room(sequence) is not None
        free_slots = self._admission.num_free_slots
        if not has_room and free_slots and self.blocks.size.can_grow:
            return None  # the pool grows instead
        victims = [] if has_room else self._preemption.victims(sequence, candidates, free_slots)
        if victims is None:
            return None
        for victim in victims:
            self._preempt(victim, builder)
        admitted = self._admit(sequence)
        assert admitted, f"no room for {sequence}"
        # Take the blocks of its first chunk now: otherwise growing sequences would take them.
        self.blocks.grow(sequence, min(self.max_tokens, sequence.num_uncomputed_tokens))
        return victims

    def _admits_none(self) -> bool:
        """Whether a sequence of a step that failed on the device runs again. Such sequences are admitted one at a time,
        and no other until it has sampled a token, so that a second failure can be attributed to it. Or whether memory
        was short, and what runs is not to become more."""
        return any(other.num_step_failures for other in self.running) or (not self.admits and bool(self.running))

    def _first_waiting(self, count: int) -> ListOf[Sequence]:
        """The first `count` waiting sequences in order, and those between them that wait for a larger pool."""
        size, first = self.blocks.size, []
        if size.can_grow or size.num_blocks == size.limit:
            return self.waiting.first(count)
        for sequence in self.waiting:
            first.append(sequence)
            count -= self.blocks.can_hold(sequence)
            if count == 0:
                break
        return first

    def _waits_for_growth(self, sequence: Sequence) -> bool:
        """Whether the whole pool is too small for a waiting sequence without what is cached of it, and cannot grow
        now."""
        return not (self.blocks.size.can_grow or self.blocks.can_hold(sequence))

    def _preempt(self, sequence: Sequence, builder: ScheduleBuilder) -> None:
        self._preemption.preempt(sequence, swap=not sequence.awaits_last_step)
        builder.preempted.add(sequence.sequence_id)

    def _queue_forks(self, parent: Sequence) -> None:
        """Queue the forks of a sequence whose prompt is computed, or which has ended."""
        for fork in self._forks.pop(parent.sequence_id, ()):
            self.waiting.add(fork)


def is_decoding(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens == 1 and not sequence.awaits_last_step
