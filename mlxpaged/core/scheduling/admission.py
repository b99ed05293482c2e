"""Decides whether a sequence may run: now, later (once blocks or a slot are free), or never.

`check_fits` finds the requests that can never run, when they arrive. `find_room` decides between now and later.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from mlxpaged.core.scheduling.block_manager import Reuse
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.preemption import Preemption
from mlxpaged.core.scheduling.sequence import Sequence, SequenceStatus


class PromptTooLongError(ValueError):
    """The request could not run even alone in the pool. limit: the most tokens of prompt and answer together."""

    def __init__(self, message: str, num_prompt_tokens: int, limit: int) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit


def check_fits(num_prompt_tokens: int, max_tokens: int | None, config: SchedulerConfig) -> None:
    """Raises PromptTooLongError if even the largest pool is too small. The last token of an answer is never run through
    the model, so it needs no room."""
    groups, chunk, num_blocks = config.groups, config.max_num_batched_tokens, config.num_blocks
    needed = num_prompt_tokens + (max_tokens or 1) - 1
    blocks = groups.blocks_needed(needed, chunk)
    if blocks > num_blocks:
        room = groups.most_tokens(num_blocks, chunk, needed)
        raise PromptTooLongError(
            f"the request needs KV memory for {needed} tokens ({blocks} blocks); the pool "
            f"holds {room} tokens ({num_blocks} blocks): raise --kv-cache-memory",
            num_prompt_tokens,
            room + 1,
        )


@dataclass(frozen=True)
class AdmissionControl:
    """It only decides, and asks for a larger pool. The scheduler keeps `changed` up to date."""

    max_num_seqs: int
    """Sequence slots. Each running sequence has one."""
    preemption: Preemption
    changed: Container[int]
    """Ids of sequences whose blocks get their contents in the step that is being scheduled."""

    @property
    def num_free_slots(self) -> int:
        return self.max_num_seqs - len(self.preemption.running)

    def find_room(self, sequence: Sequence) -> Reuse | None:
        """Return what a waiting sequence can reuse if it may run now, or None if it has to wait. It needs a free slot,
        and room for its whole prompt in addition to what the running sequences need next."""
        if self.num_free_slots < 1:
            return None
        blocks = self.preemption.blocks
        room = blocks.pool.num_free - self.preemption.reserved_blocks(sequence)
        if (least := blocks.least_room_for(sequence)) > room:
            blocks.size.ask(least - room)
            return None
        parent = sequence.fork_of if sequence.status is SequenceStatus.WAITING else None
        # A fork copies a block of its parent before its step runs: an earlier step must have written that block.
        if parent is not None and (
            parent.num_committed_tokens < sequence.num_prompt_tokens or parent.sequence_id in self.changed
        ):
            parent = None
        reuse = blocks.find(sequence, parent)
        needed = blocks.room_for(sequence, reuse)
        if needed > room and reuse.partial is not None:
            reuse = reuse.without_copy
            needed = blocks.room_for(sequence, reuse)
        if needed > room:
            blocks.size.ask(needed - room)
            return None
        return reuse
