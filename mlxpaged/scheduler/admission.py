"""Whether a sequence may run: now, later (once blocks or a slot are free), or never.

Never is decided when a request arrives, by `check_fits`; now or later in every step, by `find_room`.
"""

from __future__ import annotations

from collections.abc import Container

from mlxpaged.cache import blocks_for
from mlxpaged.scheduler.block_manager import BlockManager, Reuse
from mlxpaged.scheduler.preemption import Preemption
from mlxpaged.scheduler.queue import SequenceQueue
from mlxpaged.scheduler.sequence import Sequence, SequenceStatus


class PromptTooLongError(ValueError):
    """The request could not run even with the whole pool to itself. limit: tokens, of prompt and answer together."""

    def __init__(self, message: str, num_prompt_tokens: int, max_tokens: int | None, limit: int) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class AdmissionControl:
    """Decides, changes nothing.

    max_num_seqs: sequence slots; each of `running` has one. changed: ids of the sequences whose blocks get contents in
    the step that is being scheduled. The scheduler keeps both collections up to date.
    """

    def __init__(
        self,
        max_num_seqs: int,
        blocks: BlockManager,
        preemption: Preemption,
        running: SequenceQueue,
        changed: Container[int],
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._blocks = blocks
        self._preemption = preemption
        self._running = running
        self._changed = changed

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - len(self._running)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises PromptTooLongError if the pool is too small for the sequence."""
        pool = self._blocks.pool
        blocks = blocks_for(sequence.max_kv_tokens, pool.block_size)
        if blocks > pool.num_blocks:
            raise PromptTooLongError(
                f"{sequence.num_prompt_tokens} prompt tokens and up to {sequence.max_tokens} generated ones need "
                f"{blocks} KV blocks of {pool.block_size} tokens; the pool has {pool.num_blocks} "
                "(raise --kv-cache-memory)",
                sequence.num_prompt_tokens,
                sequence.max_tokens,
                pool.num_blocks * pool.block_size,
            )

    def find_room(self, sequence: Sequence) -> Reuse | None:
        """What a waiting sequence can reuse, if it may run now: there is a slot, and room for its whole prompt beside
        what the running sequences need next. None if it has to wait."""
        if self.num_free_slots < 1:
            return None
        room = self._blocks.pool.num_free - self._preemption.reserved_blocks(sequence)
        if self._blocks.least_room_for(sequence) > room:
            return None
        reuse = self._find_reuse(sequence)
        return reuse if self._blocks.room_for(sequence, reuse) <= room else None

    def _find_reuse(self, sequence: Sequence) -> Reuse:
        """A fork copies a block of its parent before its step runs: an earlier step must have written that block."""
        parent = sequence.fork_of if sequence.status is SequenceStatus.WAITING else None
        is_written = (
            parent is not None
            and parent.num_committed_tokens >= sequence.num_prompt_tokens
            and parent.sequence_id not in self._changed
        )
        return self._blocks.find(sequence, parent if is_written else None)
