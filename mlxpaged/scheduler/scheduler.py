"""The scheduler: every step it picks the tokens to run, within a token budget and the blocks at hand.

Whoever decodes comes first, one token each; what is left of the budget goes to chunks of prompts, of running sequences
and of newcomers alike. All orders are by effective priority: class less age, so that everybody's turn comes.

A prompt's blocks can be shared as soon as the step that computes them is made up, and a running prompt takes over what
others have computed of it before every chunk: requests that share a prefix never compute it twice, whoever goes first.

When blocks run out, cached ones that nobody uses go first; then the running sequence whose turn is last gives way, to
one that runs and needs to grow, to a waiting one of a higher class, or to one that was passed over too often. It is
swapped out where there is room, else computed again. A sequence is only accepted if it could run alone in the pool, so
the first in order can always go on.

A step may be scheduled while the one before it is still under way, its tokens unknown: a sequence is then scheduled on
with PENDING in the place of its last token. What the device does is ordered, so blocks may change hands at once.
One that needs its last token on the host (a grammar says what may follow it) sits such a step out; the others do not.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from mlxpaged.cache import OutOfBlocksError, blocks_for
from mlxpaged.cache.table_rows import IntArray
from mlxpaged.scheduler.batch import Batch, StepPlan
from mlxpaged.scheduler.block_manager import BlockManager, Reuse
from mlxpaged.scheduler.config import DECODE_MULTIPLE, LEAST_STEP_SECONDS, SchedulerConfig, SchedulerStats
from mlxpaged.scheduler.queue import ORDER, SequenceQueue
from mlxpaged.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from mlxpaged.scheduler.step_cost import StepCost

logger = logging.getLogger(__name__)

MAX_PASSES = 64
"""Steps in a row without room for a waiting sequence, after which room is made for it."""

LOOK_AHEAD = 4
"""Waiting sequences that a step may find no room for before it looks no further: a small one may pass a large one."""


class PromptTooLongError(ValueError):
    """A request that could not run even with the whole pool to itself. limit: tokens, of prompt and answer together."""

    def __init__(self, message: str, num_prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class UnknownSequenceError(KeyError):
    """No unfinished sequence has this id."""


class Admission(Enum):
    """Whether a waiting sequence may run: now, once others have given blocks or seats back, or never."""

    OK = "ok"
    LATER = "later"
    IMPOSSIBLE = "impossible"


class Scheduler:
    """Holds every unfinished sequence. `schedule` starts a step, `update` ends it; all calls come from one thread.

    clock: seconds, the one that the sequences' arrival times were taken from.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.num_blocks, config.block_size, config.num_swap_slots, config.prefix_caching, config.cache_seed
        )
        self.pool = self.blocks.pool
        self.prefix_cache = self.blocks.prefix_cache
        self.clock = clock
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = itertools.count()
        self._running = SequenceQueue()
        self._waiting = SequenceQueue()
        self._forks: dict[int, list[Sequence]] = {}  # by parent: they wait for its prompt
        self._changed: set[int] = set()  # given blocks, with their contents, for the step that is being made up
        self._decode_credit = 0.0
        self.step_cost = StepCost()
        self._preemptions = 0
        self._rescues = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises PromptTooLongError where a request of this size could never run."""
        blocks = blocks_for(num_prompt_tokens + max_tokens - 1, self.config.block_size)
        if blocks > self.pool.num_blocks:
            raise PromptTooLongError(
                f"{num_prompt_tokens} prompt tokens and up to {max_tokens} generated ones need {blocks} KV blocks of "
                f"{self.config.block_size} tokens; the pool has {self.pool.num_blocks} (raise --kv-cache-memory)",
                num_prompt_tokens,
                max_tokens,
                self.pool.num_blocks * self.config.block_size,
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a fork once its parent's prompt is computed. Raises PromptTooLongError where it could never
        run."""
        self.check_fits(sequence.num_prompt_tokens, sequence.max_tokens)
        if sequence.sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence.sequence_id} is already queued")
        self._sequences[sequence.sequence_id] = sequence
        sequence.arrival = next(self._arrivals)
        parent = sequence.fork_of
        if parent is not None and parent.sequence_id in self._sequences and parent.num_output_tokens == 0:
            self._forks.setdefault(parent.sequence_id, []).append(sequence)
        else:
            self._waiting.add(sequence)

    def get(self, sequence_id: int) -> Sequence:
        """Raises UnknownSequenceError for an id that is not, or no longer, in the scheduler."""
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownSequenceError(sequence_id) from None

    def finish(self, sequence_id: int, reason: FinishReason) -> Sequence:
        """End a sequence in whatever state it is and give everything it held back."""
        sequence = self.get(sequence_id)
        siblings = self._forks.get(sequence.fork_of.sequence_id, []) if sequence.fork_of is not None else []
        if sequence in siblings:
            siblings.remove(sequence)
        else:
            (self._running if sequence.status is SequenceStatus.RUNNING else self._waiting).remove(sequence)
        self._release_forks(sequence)
        sequence.transition(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self.blocks.release(sequence)
        del self._sequences[sequence_id]
        return sequence

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    def admission(self, sequence: Sequence) -> Admission:
        """Whether a sequence that does not run could be admitted as things are."""
        if blocks_for(sequence.max_kv_tokens, self.config.block_size) > self.pool.num_blocks:
            return Admission.IMPOSSIBLE
        seat = len(self._running) < self.config.max_num_seqs
        return Admission.OK if seat and self._fitting(sequence) else Admission.LATER

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the next step's tokens and take the blocks they need. Each call needs its `update`; at most one other
        call may come in between. Empty only where nothing is unfinished, or all of it waits for that `update`."""
        plan = StepPlan(self.config.max_num_batched_tokens)
        self._changed.clear()
        self._make_way(plan)
        if self.config.prefill_mode == "mixed":
            self._add_decodes(plan)
            self._add_prompts(plan)
        else:
            decodes_first = self._is_turn_of_decodes()
            first, second = self._add_decodes, self._add_prompts
            if not decodes_first:
                first, second = second, first
            first(plan)
            if not plan.rows:
                second(plan)
            elif decodes_first:
                self._count_passes()
        self.blocks.relieve()
        return Batch(tuple(plan.rows), self.blocks.take_moves())

    def update(self, batch: Batch, token_ids: dict[int, int], seconds: float | None = None) -> list[Sequence]:
        """The batch is done: these are its sampled tokens (sequence id -> token). End the sequences whose answer they
        complete, and return those.

        Sequences that ended since `schedule` are passed over. Preempted ones without a token here will draw it again.
        seconds: what the device took for it, where that is known.
        """
        if seconds is not None:
            contexts = [row.context_len for row in batch.rows if row.num_tokens == 1]
            self.step_cost.observe(
                contexts, [(row.start, row.num_tokens) for row in batch.rows if row.num_tokens > 1], seconds
            )
        ended = []
        for row in batch.rows:
            sequence = row.sequence
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_settled_tokens = row.context_len
            elif sequence.status is SequenceStatus.FINISHED:
                continue
            elif sequence.sequence_id not in token_ids:
                sequence.drop_pending_tokens()
                continue
            if not row.samples:
                continue
            token_id = token_ids[sequence.sequence_id]
            sequence.fill_token(token_id)
            self._release_forks(sequence)
            reason = sequence.finish_reason_after(token_id)
            if sequence.status is SequenceStatus.RUNNING:
                self.blocks.publish(sequence)  # the token may be the last of a block that the step under way computes
            if reason is not None:
                ended.append(self.finish(sequence.sequence_id, reason))
        return ended

    def get_block_tables(self, sequence_ids: Iterable[int]) -> IntArray:
        """Block ids [n, b] of n sequences, in order; behind the end of those that have less than b stands -1.

        Raises UnknownSequenceError for an id without blocks."""
        rows = []
        for sequence_id in sequence_ids:
            table = self.get(sequence_id).block_table
            if table is None or table.row is None:
                raise UnknownSequenceError(sequence_id)
            rows.append(table.row)
        return self.blocks.tables.select(rows)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            blocks=self.pool.usage(),
            swap=self.blocks.swap_usage(),
            preemptions_total=self._preemptions,
            rescues_total=self._rescues,
            blocks_copied_total=self.blocks.blocks_copied,
            blocks_swapped_out_total=self.blocks.blocks_swapped_out,
            blocks_swapped_in_total=self.blocks.blocks_swapped_in,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            prompt_tokens_total=self._prompt_tokens,
        )

    @property
    def running(self) -> SequenceQueue:
        """In order of effective priority."""
        return self._running

    @property
    def waiting(self) -> SequenceQueue:
        """In order of effective priority."""
        return self._waiting

    # -- failure -------------------------------------------------------------------------------------------------

    def fail(self, sequence_id: int) -> list[Sequence]:
        """End a sequence whose step failed. What the steps under way should have written for it is unpublished.

        Returns the sequences that had already adopted such blocks: they are preempted and start over.
        """
        sequence = self.get(sequence_id)
        tainted = self.blocks.retract(sequence)
        self.finish(sequence_id, FinishReason.ERROR)
        return self._void_dependants(tainted)

    def start_over(self, sequence: Sequence) -> list[Sequence]:
        """What a sequence has computed in the steps under way, or what was moved for it, is lost: it is computed again.
        So are those that had adopted blocks from it, which are returned."""
        if sequence.status is SequenceStatus.RUNNING:
            tainted = self.blocks.retract(sequence)
            self._preempt(sequence, swap=False)
            return self._void_dependants(tainted)
        if sequence.status is SequenceStatus.SWAPPED:
            self._lose_swapped(sequence)
        return []

    def undo_moves(self, batch: Batch) -> None:
        """The moves of a batch failed, wholly or in part: whoever needs them starts over. The step under way before it
        did not fail, and its tokens will be read."""
        slots = {slot for _, slot in batch.moves.swap_out}
        blocks = {block for _, block in (*batch.moves.copies, *batch.moves.swap_in)}
        for sequence in list(self._sequences.values()):
            table = sequence.block_table
            if not slots.isdisjoint(sequence.swap_slots):
                self._lose_swapped(sequence)
            elif table is not None and not blocks.isdisjoint(table.block_ids):
                sequence.num_settled_tokens = 0
                self.start_over(sequence)

    def _lose_swapped(self, sequence: Sequence) -> None:
        sequence.transition(SequenceStatus.PREEMPTED)
        self.blocks.drop_swapped(sequence)

    def reset_cache(self) -> None:
        """Forget every value in the pool: running sequences start over, the prefix cache is emptied."""
        for sequence in list(self._running):
            self._preempt(sequence, swap=False)
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def _void_dependants(self, tainted: set[int]) -> list[Sequence]:
        dependants = []
        for other in list(self._running):
            assert other.block_table is not None
            if not tainted.isdisjoint(other.block_table.block_ids):
                tainted |= self.blocks.retract(other)
                self._preempt(other, swap=False)
                dependants.append(other)
        return dependants

    # -- decoding and prompts ------------------------------------------------------------------------------------

    def _is_turn_of_decodes(self) -> bool:
        """Of steps that do either, decoding gets its share; what finds nothing to do leaves its turn to the other."""
        self._decode_credit += self.config.decode_preference
        if self._decode_credit < 1:
            return False
        self._decode_credit -= 1
        return True

    def _count_passes(self) -> None:
        """In a step that looks at no prompts, for those that found no room in the last one that did."""
        if len(self._running) < self.config.max_num_seqs:
            for sequence in self._waiting.first(LOOK_AHEAD):
                sequence.num_passes += sequence.num_passes > 0

    def _add_decodes(self, plan: StepPlan) -> None:
        for sequence in list(filter(is_decoding, self._running)):
            if sequence.status is SequenceStatus.RUNNING and self._grow(sequence, 1, plan):
                self._add(plan, sequence, 1)

    def _add_prompts(self, plan: StepPlan) -> None:
        """Chunks of running and waiting prompts, in order. It ends with a running one that finds no block: newcomers
        would only be in its way."""
        if plan.rows:
            share = int((1 - self.config.decode_preference) * self.config.max_num_batched_tokens)
            plan.budget = min(plan.budget, max(1, share))
        prefilling = [sequence for sequence in self._running if sequence.num_uncomputed_tokens > 1]
        waiting = self._waiting.first(self.config.max_num_seqs - len(self._running) + LOOK_AHEAD)
        if prefilling or waiting:
            self._limit_prompts(plan)
        refused = 0
        for sequence in heapq.merge(prefilling, waiting, key=ORDER):
            if plan.budget == 0:
                return
            if sequence.status is SequenceStatus.RUNNING:
                if self.blocks.catch_up(sequence):
                    self._changed.add(sequence.sequence_id)
                num_tokens = plan.chunk_of(sequence)
                if not self._grow(sequence, num_tokens, plan):
                    return
                self._add(plan, sequence, num_tokens)
            elif refused == LOOK_AHEAD or sequence.sequence_id in plan.gave_way or sequence.awaits_host:
                continue
            elif self._admit(sequence):
                num_tokens = plan.chunk_of(sequence)
                self.blocks.grow(sequence, num_tokens)
                self._add(plan, sequence, num_tokens)
            else:
                refused += 1

    def _limit_prompts(self, plan: StepPlan) -> None:
        """Those who decode, in this step or between such steps, are not to wait for prompts longer than was said."""
        limit = self.config.max_step_seconds
        decoding = [row.context_len for row in plan.rows]
        waited_for = decoding or [len(sequence.token_ids) for sequence in filter(is_decoding, self._running)]
        costs = None if limit == 0 or not (waited_for or limit) else self.step_cost.costs()
        if costs is None:
            return
        if limit is None:
            limit = max(DECODE_MULTIPLE * costs.decode_seconds(waited_for), LEAST_STEP_SECONDS)
        plan.limit(costs, limit - costs.decode_seconds(decoding))

    def _add(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        plan.add(sequence, num_tokens)
        self.blocks.publish(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Blocks for the next `num_tokens` tokens. Those behind it that are not in the step yet give way, the last
        first. False where that is not enough: it keeps its blocks, and sits the step out."""
        while True:
            try:
                self.blocks.grow(sequence, num_tokens)
                return True
            except OutOfBlocksError:
                last = next(other for other in reversed(self._running) if other not in plan)
                if last is sequence:
                    return False
                self._give_way(last, plan)

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool:
        """Move a waiting sequence to RUNNING if there is a seat and room for it."""
        if len(self._running) >= self.config.max_num_seqs:
            return False
        reuse = self._fitting(sequence)
        if reuse is None:
            sequence.num_passes += 1
            return False
        first_time = sequence.status is SequenceStatus.WAITING
        self._waiting.remove(sequence)
        self.blocks.start(sequence, reuse)
        sequence.transition(SequenceStatus.RUNNING)
        sequence.num_passes = 0
        self._running.add(sequence)
        self._changed.add(sequence.sequence_id)
        if first_time:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._prefix_hit_tokens += sequence.num_cached_tokens
            self._prompt_tokens += sequence.num_prompt_tokens
        self._log("admitted", sequence, logging.DEBUG)
        shared = [self.pool.ref_count(cached.block) for cached in reuse.hit.blocks]
        if shared:
            logger.debug(
                "%s: prefix_hit=true, %d blocks (%d tokens), reference counts up to %d",
                sequence.label,
                len(shared),
                len(shared) * self.config.block_size,
                max(shared),
            )
        return True

    def _reusable(self, sequence: Sequence) -> Reuse:
        """A fork copies a block of its parent before its step runs: by then a step before it must have written it."""
        parent = sequence.fork_of if sequence.status is SequenceStatus.WAITING else None
        there = (
            parent is not None
            and parent.num_settled_tokens >= sequence.num_prompt_tokens
            and parent.sequence_id not in self._changed
        )
        return self.blocks.find(sequence, parent if there else None)

    def _fitting(self, sequence: Sequence) -> Reuse | None:
        """What a waiting sequence need not compute, where it can be prefilled to its end beside what the others need to
        finish their prompts, or their next token. None where there is no room for that."""
        room = self.pool.num_free - self._reserved(sequence)
        if self.blocks.least_room_for(sequence) > room:
            return None
        reuse = self._reusable(sequence)
        return reuse if self.blocks.room_for(sequence, reuse) <= room else None

    def _reserved(self, sequence: Sequence) -> int:
        return sum(self._reserve(other, sequence) for other in self._running)

    @staticmethod
    def _reserve(other: Sequence, sequence: Sequence) -> int:
        """Blocks that a newcomer leaves to one that runs."""
        if gives_way(other, sequence):
            return 0
        assert other.block_table is not None
        return other.block_table.blocks_missing(len(other.token_ids))

    def _make_way(self, plan: StepPlan) -> None:
        """Before a step is made up, admit a waiting sequence that was passed over MAX_PASSES times, whoever has to give
        way for that; or else the first in the queue, if those of lower classes that are behind it have to.

        One that was let in by the first rule does not give way by either: several that were passed over would take
        turns in throwing each other out, and none would get anywhere.
        """
        candidates = self._waiting.first(LOOK_AHEAD)
        if not candidates:
            return
        rescued = next((sequence for sequence in candidates if sequence.num_passes >= MAX_PASSES), None)
        sequence = candidates[0] if rescued is None else rescued
        willing = [
            other
            for other in reversed(self._running)
            if (gives_way(other, sequence) if rescued is None else not other.rescued)
        ]
        if rescued is None and not willing:
            return
        victims = [] if self.admission(sequence) is Admission.OK else self._victims(sequence, willing)
        if victims is None:
            return
        for victim in victims:
            self._give_way(victim, plan)
        admitted = self._admit(sequence)
        assert admitted, f"no room for {sequence}"
        self.blocks.grow(sequence, min(plan.budget, sequence.num_uncomputed_tokens))  # before anybody else takes them
        if rescued is not None:
            rescued.rescued = True
            if victims:
                self._rescues += 1
                self._log("made room for", sequence, logging.INFO)

    def _victims(self, sequence: Sequence, willing: list[Sequence]) -> list[Sequence] | None:
        """Those that have to give way for a waiting sequence, from the front of `willing`. None where not even all of
        them would do: nobody gives way in vain."""
        room = self.pool.num_free - self._reserved(sequence)
        most = sum(self._reserve(other, sequence) + len(other.block_table or ()) for other in willing)
        if self.blocks.least_room_for(sequence) > room + most:
            return None
        reuse = self.blocks.find(sequence)
        hit = {cached.block for cached in reuse.hit.blocks}  # that they are free again is no gain
        short = self.blocks.room_for(sequence, reuse) - room
        seats = self.config.max_num_seqs - len(self._running)
        dropped: Counter[int] = Counter()
        victims: list[Sequence] = []
        while short > 0 or len(victims) + seats < 1:
            if len(victims) == len(willing):
                return None
            other = willing[len(victims)]
            assert other.block_table is not None
            victims.append(other)
            short -= self._reserve(other, sequence)
            for block in other.block_table.block_ids:
                dropped[block] += 1
                short -= dropped[block] == self.pool.ref_count(block) and block not in hit
        return victims

    def _release_forks(self, parent: Sequence) -> None:
        """Its prompt is computed, or will not be by it: the forks may queue."""
        for fork in self._forks.pop(parent.sequence_id, ()):
            self._waiting.add(fork)

    # -- preemption ----------------------------------------------------------------------------------------------

    def _give_way(self, sequence: Sequence, plan: StepPlan) -> None:
        self._preempt(sequence, swap=not sequence.awaits_last_token)
        plan.gave_way.add(sequence.sequence_id)

    def _preempt(self, sequence: Sequence, swap: bool) -> None:
        """Back to the queue, at its place. swap: keep its values in swap space if that has room. Otherwise they are
        computed again, but for full blocks that are still found in the prefix cache when its turn comes."""
        swapped = swap and self.blocks.swap_out(sequence)
        if not swapped:
            self.blocks.release(sequence)
        self._running.remove(sequence)
        sequence.rescued = False
        sequence.transition(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        sequence.num_preemptions += 1
        self._preemptions += 1
        self._waiting.add(sequence)
        self._log("swapped out" if swapped else "preempted", sequence, logging.INFO)

    def _log(self, what: str, sequence: Sequence, level: int) -> None:
        now = self.clock()
        logger.log(
            level,
            "%s %s: priority %s, effective %.2f, %.1f s old, preemption %d",
            what,
            sequence.label,
            sequence.priority.name,
            sequence.effective_priority(now),
            now - sequence.arrival_time,
            sequence.num_preemptions,
        )


def is_decoding(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens == 1 and not (sequence.awaits_last_token or sequence.awaits_host)


def gives_way(other: Sequence, sequence: Sequence) -> bool:
    """Whether one that runs gives way to a waiting one, only because it is of a lower class and its turn is later."""
    return other.priority > sequence.priority and other.order > sequence.order and not other.rescued
