"""Whether a waiting sequence may run, and who would have to give way for it. Answers only: the scheduler acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from collections.abc import Sequence as ListOf
from enum import Enum

from mlxpaged.cache import blocks_for
from mlxpaged.scheduler.block_manager import BlockManager, Reuse
from mlxpaged.scheduler.queue import SequenceQueue
from mlxpaged.scheduler.sequence import Sequence, SequenceStatus


class PromptTooLongError(ValueError):
    """A request that could not run even with the whole pool to itself. limit: tokens, of prompt and answer together."""

    def __init__(self, message: str, num_prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class Admission(Enum):
    """Whether a waiting sequence may run: now, once others have given blocks or seats back, or never."""

    OK = "ok"
    LATER = "later"
    IMPOSSIBLE = "impossible"


class AdmissionControl:
    """max_num_seqs: seats. running: who has one. changed: ids of sequences whose blocks get their contents only with
    the step that is being made up; the scheduler keeps both up to date."""

    def __init__(
        self, max_num_seqs: int, blocks: BlockManager, running: SequenceQueue, changed: Container[int]
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._pool = blocks.pool
        self._running = running
        self._changed = changed

    @property
    def num_free_seats(self) -> int:
        return self._max_num_seqs - len(self._running)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises PromptTooLongError where a request of this size could never run."""
        block_size = self._pool.block_size
        blocks = blocks_for(num_prompt_tokens + max_tokens - 1, block_size)
        if blocks > self._pool.num_blocks:
            raise PromptTooLongError(
                f"{num_prompt_tokens} prompt tokens and up to {max_tokens} generated ones need {blocks} KV blocks of "
                f"{block_size} tokens; the pool has {self._pool.num_blocks} (raise --kv-cache-memory)",
                num_prompt_tokens,
                max_tokens,
                self._pool.num_blocks * block_size,
            )

    def judge(self, sequence: Sequence) -> Admission:
        """Whether a sequence that does not run could be admitted as things are."""
        if blocks_for(sequence.max_kv_tokens, self._pool.block_size) > self._pool.num_blocks:
            return Admission.IMPOSSIBLE
        return Admission.OK if self.num_free_seats > 0 and self.fitting(sequence) else Admission.LATER

    def fitting(self, sequence: Sequence) -> Reuse | None:
        """What a waiting sequence need not compute, where it can be prefilled to its end beside what the others need to
        finish their prompts, or their next token. None where there is no room for that."""
        room = self._pool.num_free - self._reserved(sequence)
        if self._blocks.least_room_for(sequence) > room:
            return None
        reuse = self._reusable(sequence)
        return reuse if self._blocks.room_for(sequence, reuse) <= room else None

    def victims(self, sequence: Sequence, willing: ListOf[Sequence]) -> list[Sequence] | None:
        """Those that have to give way for a waiting sequence, from the front of `willing`. None where not even all of
        them would do: nobody gives way in vain."""
        room = self._pool.num_free - self._reserved(sequence)
        most = sum(self._reserve(other, sequence) + len(other.block_table or ()) for other in willing)
        if self._blocks.least_room_for(sequence) > room + most:
            return None
        reuse = self._blocks.find(sequence)
        hit = {cached.block for cached in reuse.hit.blocks}  # that they are free again is no gain
        short = self._blocks.room_for(sequence, reuse) - room
        seats = self.num_free_seats
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
                short -= dropped[block] == self._pool.ref_count(block) and block not in hit
        return victims

    def _reusable(self, sequence: Sequence) -> Reuse:
        """A fork copies a block of its parent before its step runs: by then a step before it must have written it."""
        parent = sequence.fork_of if sequence.status is SequenceStatus.WAITING else None
        there = (
            parent is not None
            and parent.num_committed_tokens >= sequence.num_prompt_tokens
            and parent.sequence_id not in self._changed
        )
        return self._blocks.find(sequence, parent if there else None)

    def _reserved(self, sequence: Sequence) -> int:
        return sum(self._reserve(other, sequence) for other in self._running)

    @staticmethod
    def _reserve(other: Sequence, sequence: Sequence) -> int:
        """Blocks that a newcomer leaves to one that runs."""
        if gives_way(other, sequence):
            return 0
        assert other.block_table is not None
        return other.block_table.blocks_missing(len(other.token_ids))


def gives_way(other: Sequence, sequence: Sequence) -> bool:
    """Whether one that runs gives way to a waiting one, only because it is of a lower class and its turn is later."""
    return other.priority > sequence.priority and other.order > sequence.order and not other.rescued
