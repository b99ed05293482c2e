"""The scheduler: every step it picks the tokens to run, within a token budget and the blocks at hand.

Decoding sequences come first, one token each; what is left of the budget goes to prompt chunks of the running
sequences, then to newcomers. All orders are by arrival. So a newcomer is only looked at once every running prompt is
computed to its end in this step, with all its blocks published: requests that share a prefix and arrive together, or
while it is being computed, wait for it and never compute it twice.

A step may be scheduled while the one before it is still under way, its tokens unknown: a sequence is then scheduled on
with PENDING in the place of its last token. What the device does is ordered, so blocks may change hands at once.

Two rules keep any load from wedging it: a sequence is only accepted if it could run alone in the pool, and a running
sequence that needs a block takes it from the newest one.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from mlxpaged.cache import BlockPool, BlockTable, BlockUsage, OutOfBlocksError, PrefixCache, PrefixHit, blocks_for
from mlxpaged.cache.prefix_cache import CachedBlock
from mlxpaged.scheduler.batch import Batch, ScheduledSequence
from mlxpaged.scheduler.sequence import FinishReason, Sequence, SequenceStatus

logger = logging.getLogger(__name__)


class PromptTooLongError(ValueError):
    """A request that could not run even with the whole pool to itself."""


class UnknownSequenceError(KeyError):
    """No unfinished sequence has this id."""


@dataclass(frozen=True)
class SchedulerConfig:
    """num_blocks: KV blocks of the pool. max_num_batched_tokens: the token budget of a step.

    cache_seed: whatever the KV values depend on beside the tokens (model, adapter, KV type).
    """

    num_blocks: int
    block_size: int = 32
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    cache_seed: bytes = b""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token a step"
            )


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot. Counters (`total`) only grow; preempted sequences count as waiting. swap: slots of the swap space,
    None without one."""

    running: int
    waiting: int
    blocks: BlockUsage
    preemptions_total: int
    prefix_hit_tokens_total: int
    prompt_tokens_total: int
    swap: BlockUsage | None = None


def arrival(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """Holds every unfinished sequence. `schedule` starts a step, `update` ends it; all calls come from one thread."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool: BlockPool[CachedBlock] = BlockPool(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.pool, config.cache_seed) if config.prefix_caching else None
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = itertools.count()
        self._running: list[Sequence] = []  # in order of arrival
        self._waiting: list[Sequence] = []  # in order of arrival
        self._preemptions = 0
        self._prefix_hit_tokens = 0
        self._prompt_tokens = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises PromptTooLongError where a request of this size could never run."""
        tokens = num_prompt_tokens + max_tokens - 1
        blocks = blocks_for(tokens, self.config.block_size)
        if blocks > self.pool.num_blocks:
            raise PromptTooLongError(
                f"{num_prompt_tokens} prompt tokens and up to {max_tokens} generated ones need {blocks} KV blocks of "
                f"{self.config.block_size} tokens; the pool has {self.pool.num_blocks} (raise --kv-cache-memory)"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises PromptTooLongError where it could never run."""
        self.check_fits(sequence.num_prompt_tokens, sequence.max_tokens)
        if sequence.sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence.sequence_id} is already queued")
        self._sequences[sequence.sequence_id] = sequence
        sequence.arrival = next(self._arrivals)
        bisect.insort(self._waiting, sequence, key=arrival)

    def get(self, sequence_id: int) -> Sequence:
        """Raises UnknownSequenceError for an id that is not, or no longer, in the scheduler."""
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise UnknownSequenceError(sequence_id) from None

    def finish(self, sequence_id: int, reason: FinishReason) -> Sequence:
        """End a sequence in whatever state it is and give everything it held back."""
        sequence = self.get(sequence_id)
        (self._running if sequence.status is SequenceStatus.RUNNING else self._waiting).remove(sequence)
        sequence.transition(SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        self._give_back(sequence)
        del self._sequences[sequence_id]
        return sequence

    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose the next step's tokens and take the blocks they need. Each call needs its `update`; at most one other
        call may come in between. Empty only where nothing is unfinished, or all of it waits for that `update`."""
        budget = self.config.max_num_batched_tokens
        rows: list[ScheduledSequence] = []
        in_step: set[int] = set()
        starved = False

        def add(sequence: Sequence, num_tokens: int) -> None:
            nonlocal budget
            start = sequence.num_computed_tokens
            end = start + num_tokens
            sequence.num_computed_tokens = end
            self._publish(sequence)
            samples = end == len(sequence.token_ids)
            if samples:
                sequence.expect_token()
            rows.append(ScheduledSequence(sequence, start, num_tokens, samples))
            in_step.add(sequence.sequence_id)
            budget -= num_tokens

        running = [sequence for sequence in self._running if not sequence.awaits_last_token]
        for sequence in running:
            decoding = sequence.status is SequenceStatus.RUNNING and sequence.num_uncomputed_tokens == 1
            if decoding and self._grow(sequence, 1, in_step):
                add(sequence, 1)
        for sequence in running:
            if budget == 0:
                break
            if sequence.status is SequenceStatus.RUNNING and sequence.sequence_id not in in_step:
                num_tokens = min(budget, sequence.num_uncomputed_tokens)
                if self._grow(sequence, num_tokens, in_step):
                    add(sequence, num_tokens)
                else:
                    starved = True
        while budget > 0 and not starved and len(self._running) < self.config.max_num_seqs:
            newcomer = self._admit(budget)
            if newcomer is None:
                break
            add(newcomer, min(budget, newcomer.num_uncomputed_tokens))
        return Batch(tuple(rows))

    def update(self, batch: Batch, token_ids: dict[int, int]) -> list[Sequence]:
        """The batch is done: these are its sampled tokens (sequence id -> token). End the sequences whose answer they
        complete, and return those.

        Sequences that ended since `schedule` are passed over. Preempted ones without a token here will draw it again.
        """
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
            reason = sequence.finish_reason_after(token_id)
            if sequence.status is SequenceStatus.RUNNING:
                self._publish(sequence)  # the token may be the last of a block that the step under way computes
            if reason is not None:
                ended.append(self.finish(sequence.sequence_id, reason))
        return ended

    def fail(self, sequence_id: int) -> list[Sequence]:
        """End a sequence whose step failed. What the steps under way should have written for it is unpublished.

        Returns the sequences that had already adopted such blocks: they are preempted and start over.
        """
        sequence = self.get(sequence_id)
        tainted = self._retract(sequence)
        self.finish(sequence_id, FinishReason.ERROR)
        dependants = []
        for other in list(self._running):
            assert other.block_table is not None
            if not tainted.isdisjoint(other.block_table.block_ids):
                tainted |= self._retract(other)
                self._preempt(other)
                dependants.append(other)
        return dependants

    def _retract(self, sequence: Sequence) -> set[int]:
        if sequence.block_table is None:
            return set()
        return set(sequence.block_table.retract(sequence.num_settled_tokens // self.config.block_size))

    def reset_cache(self) -> None:
        """Forget every computed value: running sequences start over, the prefix cache is emptied."""
        for sequence in reversed(list(self._running)):
            self._preempt(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def get_block_tables(self, sequence_ids: Iterable[int]) -> dict[int, list[int]]:
        """Block ids per sequence, in order; the tables' own lists, which grow.

        Raises UnknownSequenceError for an id without blocks."""
        tables = {}
        for sequence_id in sequence_ids:
            table = self.get(sequence_id).block_table
            if table is None:
                raise UnknownSequenceError(sequence_id)
            tables[sequence_id] = table.block_ids
        return tables

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            blocks=self.pool.usage(),
            preemptions_total=self._preemptions,
            prefix_hit_tokens_total=self._prefix_hit_tokens,
            prompt_tokens_total=self._prompt_tokens,
        )

    # -- blocks --------------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence, num_tokens: int, in_step: set[int]) -> bool:
        """Room for the next `num_tokens` tokens, preempting newer sequences that this step does not run yet.

        Where only older ones, or ones already in the step, could give way: a decoding sequence is preempted itself,
        a prefilling one keeps its blocks and sits this step out. False in both cases.
        """
        assert sequence.block_table is not None
        while True:
            try:
                sequence.block_table.grow(sequence.num_computed_tokens + num_tokens)
                return True
            except OutOfBlocksError:
                newest = next((s for s in reversed(self._running) if s.sequence_id not in in_step), sequence)
                if newest is not sequence:
                    self._preempt(newest)
                    continue
                if sequence.num_uncomputed_tokens == 1:
                    self._preempt(sequence)
                return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old place. Its full blocks stay findable until they are handed out again."""
        sequence.transition(SequenceStatus.PREEMPTED)
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed_tokens = sequence.num_settled_tokens = 0
        sequence.num_preemptions += 1
        self._preemptions += 1
        bisect.insort(self._waiting, sequence, key=arrival)
        logger.info("preempted sequence %d (preemption %d)", sequence.sequence_id, sequence.num_preemptions)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.block_table is not None:
            sequence.block_table.release()
            sequence.block_table = None

    # -- admission -----------------------------------------------------------------------------------------------

    def _admit(self, budget: int) -> Sequence | None:
        """Move the first waiting sequence to RUNNING, with blocks for its first chunk; None where it has to wait on."""
        if not self._waiting:
            return None
        sequence = self._waiting[0]
        hit = self._find_prefix(sequence)
        if not self._has_room(sequence, hit):
            return None
        del self._waiting[0]
        self._start(sequence, hit, budget)
        return sequence

    def _find_prefix(self, sequence: Sequence) -> PrefixHit:
        if self.prefix_cache is None:
            return PrefixHit()
        self.prefix_cache.extend_keys(sequence.block_keys, sequence.token_ids, len(sequence.token_ids))
        return self.prefix_cache.match(self._reusable_keys(sequence), sequence.token_ids)

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks it may take from the cache: at least one token must be left to compute for its logits."""
        return sequence.block_keys[: (len(sequence.token_ids) - 1) // self.config.block_size]

    def _has_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether it can be prefilled to its end beside what the running sequences need to finish theirs.

        Admitting on the first chunk alone would let prompts preempt each other half-way; without room for the first
        token of the answer, a newcomer would be the first to be preempted, right after its prefill.
        """
        reserved = sum(s.block_table.blocks_missing(len(s.token_ids)) for s in self._running if s.block_table)
        revived = sum(self.pool.ref_count(cached.block) == 0 for cached in hit.blocks)
        tokens = min(len(sequence.token_ids) + 1, sequence.max_kv_tokens)
        wanted = blocks_for(tokens, self.config.block_size) - len(hit)
        return wanted + reserved <= self.pool.num_free - revived

    def _start(self, sequence: Sequence, hit: PrefixHit, budget: int) -> None:
        first_time = sequence.status is SequenceStatus.WAITING
        table = BlockTable(self.pool, self.prefix_cache)
        table.adopt(hit)
        cached = len(hit) * self.config.block_size
        table.grow(cached + min(budget, len(sequence.token_ids) - cached))
        sequence.transition(SequenceStatus.RUNNING)
        sequence.block_table = table
        sequence.num_computed_tokens = sequence.num_settled_tokens = cached
        if first_time:
            sequence.num_cached_tokens = cached
            self._prefix_hit_tokens += cached
            self._prompt_tokens += sequence.num_prompt_tokens
        bisect.insort(self._running, sequence, key=arrival)
        if hit:
            logger.debug("sequence %d: prefix_hit=true, %d cached tokens", sequence.sequence_id, cached)

    def _publish(self, sequence: Sequence) -> None:
        """Offer the blocks that this step fills. Every layer writes before it attends, so even a sequence of the same
        step may use them, provided it comes later in the batch's order."""
        if self.prefix_cache is None:
            return
        assert sequence.block_table is not None
        num_tokens = min(sequence.num_computed_tokens, sequence.num_known_tokens)
        self.prefix_cache.extend_keys(sequence.block_keys, sequence.token_ids, num_tokens)
        sequence.block_table.publish(sequence.token_ids, num_tokens, sequence.block_keys)
