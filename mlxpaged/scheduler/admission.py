"""Whether a sequence may run: now, later (once blocks or a slot are free), or never.

Never is decided when a request arrives, by `check_fits`; now or later in every step, by `find_room`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

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


@dataclass(frozen=True)
class AdmissionControl:
    """Decides, changes nothing. The scheduler keeps `running` and `changed` up to date."""

    max_num_seqs: int
    """Sequence slots. Each running sequence has one."""
    blocks: BlockManager
    preemption: Preemption
    running: SequenceQueue
    changed: Container[int]
    """Ids of the sequences whose blocks get their contents in the step that is being scheduled."""

    @property
    def num_free_slots(self) -> int:
        return self.max_num_seqs - len(self.running)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises PromptTooLongError if the pool is too small for the sequence."""
        pool = self.blocks.pool
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
        room = self.blocks.pool.num_free - self.preemption.reserved_blocks(sequence)
        if self.blocks.least_room_for(sequence) > room:
            return None
        parent = sequence.fork_of if sequence.status is SequenceStatus.WAITING else None
        # A fork copies a block of its parent before its step runs: an earlier step must have written that block.
        if parent is not None and (
            parent.num_committed_tokens < sequence.num_prompt_tokens or parent.sequence_id in self.changed
        ):
            parent = None
        reuse = self.blocks.find(sequence, parent)
        return reuse if self.blocks.room_for(sequence, reuse) <= room else None
