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
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable

from mlxpaged.cache import OutOfBlocksError
from mlxpaged.cache.table_rows import IntArray
from mlxpaged.scheduler.admission import Admission, AdmissionControl, gives_way
from mlxpaged.scheduler.batch import Batch, StepPlan
from mlxpaged.scheduler.block_manager import BlockManager
from mlxpaged.scheduler.config import SchedulerConfig, SchedulerStats
from mlxpaged.scheduler.preemption import Preemption
from mlxpaged.scheduler.queue import ORDER, SequenceQueue
from mlxpaged.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from mlxpaged.scheduler.step_limit import StepLimit

logger = logging.getLogger(__name__)

MAX_PASSES = 64
"""Steps in a row without room for a waiting sequence, after which room is made for it."""

LOOK_AHEAD = 4
"""Waiting sequences that a step may find no room for before it looks no further: a small one may pass a large one."""


class UnknownSequenceError(KeyError):
    """No unfinished sequence has this id."""


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
        self.admissions = AdmissionControl(config.max_num_seqs, self.blocks, self._running, self._changed)
        self._preemption = Preemption(self.blocks, self._running, self._waiting, clock)
        self._step_limit = StepLimit(config.max_step_seconds)
        self._decode_credit = 0.0
        self._rescues = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; a fork once its parent's prompt is computed. Raises PromptTooLongError where it could never
        run."""
        self.admissions.check_fits(sequence.num_prompt_tokens, sequence.max_tokens)
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

    def observe(self, batch: Batch, seconds: float) -> None:
        """The device took `seconds` for these rows, all of which it computed, and for nothing else."""
        self._step_limit.observe(batch, seconds)

    def update(self, batch: Batch, token_ids: dict[int, int]) -> list[Sequence]:
        """The batch is done: these are its sampled tokens (sequence id -> token). End the sequences whose answer they
        complete, and return those.

        Sequences that ended since `schedule` are passed over. Preempted ones without a token here will draw it again.
        """
        ended = []
        for row in batch.rows:
            sequence = row.sequence
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_committed_tokens = row.context_len
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
            preemptions_total=self._preemption.total,
            starvation_admissions_total=self._rescues,
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
        return self._preemption.void_dependants(tainted)

    def start_over(self, sequence: Sequence) -> list[Sequence]:
        """What a sequence has computed in the steps under way is lost. Returns those that had adopted blocks from it:
        they start over too."""
        return self._preemption.start_over(sequence)

    def undo_moves(self, batch: Batch) -> None:
        """The moves of a batch failed, wholly or in part: whoever needs them starts over. The step under way before it
        did not fail, and its tokens will be read."""
        self._preemption.undo_moves(batch.moves, list(self._sequences.values()))

    def reset_cache(self) -> None:
        """Forget every value in the pool: running sequences start over, the prefix cache is emptied."""
        self._preemption.start_all_over()
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

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
        if self.admissions.num_free_seats > 0:
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
        waiting = self._waiting.first(self.admissions.num_free_seats + LOOK_AHEAD)
        if prefilling or waiting:
            self._step_limit.apply(plan, (len(sequence.token_ids) for sequence in filter(is_decoding, self._running)))
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
            elif refused == LOOK_AHEAD or sequence.sequence_id in plan.gave_way or self._is_held_back(sequence):
                continue
            elif self._admit(sequence):
                num_tokens = plan.chunk_of(sequence)
                self.blocks.grow(sequence, num_tokens)
                self._add(plan, sequence, num_tokens)
            else:
                refused += 1

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
        if self.admissions.num_free_seats < 1:
            return False
        reuse = self.admissions.fitting(sequence)
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
        logger.debug("admitted %s: %s", sequence.label, sequence.standing(self.clock()))
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

    def _make_way(self, plan: StepPlan) -> None:
        """Before a step is made up, admit a waiting sequence that was passed over MAX_PASSES times, whoever has to give
        way for that; or else the first in the queue, if those of lower classes that are behind it have to.

        One that was let in by the first rule does not give way by either: several that were passed over would take
        turns in throwing each other out, and none would get anywhere.
        """
        candidates = [sequence for sequence in self._waiting.first(LOOK_AHEAD) if not self._is_held_back(sequence)]
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
        victims = [] if self.admissions.judge(sequence) is Admission.OK else self.admissions.victims(sequence, willing)
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
                logger.info("made room for %s: %s", sequence.label, sequence.standing(self.clock()))

    def _is_held_back(self, sequence: Sequence) -> bool:
        """After a device error, sequences are readmitted one at a time, each after the one before has sampled a token.
        A second error can then be put down to one sequence."""
        return sequence.num_device_failures > 0 and any(other.num_device_failures for other in self._running)

    def _release_forks(self, parent: Sequence) -> None:
        """Its prompt is computed, or will not be by it: the forks may queue."""
        for fork in self._forks.pop(parent.sequence_id, ()):
            self._waiting.add(fork)

    # -- preemption ----------------------------------------------------------------------------------------------

    def _give_way(self, sequence: Sequence, plan: StepPlan) -> None:
        self._preemption.preempt(sequence, swap=not sequence.awaits_last_token)
        plan.gave_way.add(sequence.sequence_id)


def is_decoding(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens == 1 and not sequence.awaits_last_token
