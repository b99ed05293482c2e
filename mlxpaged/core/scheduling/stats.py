"""What a scheduler reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpaged.core.blocks.block_pool import BlockUsage


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot. Counters (`total`) only grow; preempted and swapped sequences count as waiting."""

    running: int
    waiting: int
    blocks: BlockUsage
    max_blocks: int  # that the pool can grow to
    swap: BlockUsage
    checkpoints: int  # of recurrent states, that a prompt can start from
    max_checkpoints: int
    preemptions_total: int
    starvation_admissions_total: int
    blocks_copied_total: int
    blocks_swapped_out_total: int
    blocks_swapped_in_total: int
    prefix_hit_tokens_total: int
    prompt_tokens_total: int
