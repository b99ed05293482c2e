"""What a scheduler is made with, and what it tells of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from mlxpaged.cache import BlockUsage

PrefillMode = Literal["mixed", "separate"]
PREFILL_MODES: tuple[str, ...] = get_args(PrefillMode)

DECODE_MULTIPLE = 4.0
"""Of a step's time without prompts: streams keep a quarter of their pace while a prompt is computed, and three quarters
of the device's time are its. docs/performance.md has what a larger limit brought and cost."""

LEAST_STEP_SECONDS = 0.05
"""Twenty tokens a second are faster than anybody reads: on a fast device prompts need not be cut smaller."""


@dataclass(frozen=True)
class SchedulerConfig:
    """num_blocks: KV blocks of the pool. num_swap_slots: blocks that the swap space holds.

    max_num_batched_tokens: the token budget of a step. prefill_mode: "mixed" steps compute prompts beside decoding
    sequences, "separate" ones either. decode_preference, 0 to below 1: in mixed steps the share of the budget that
    prompts leave alone while anybody decodes; in separate ones the share of steps that decode while prompts wait.
    max_step_seconds: what prompts may make of any step, by what steps have taken so far; LEAST_CHUNK tokens of them run
    all the same. 0 for no limit; None for DECODE_MULTIPLE times what it would take without them, or LEAST_STEP_SECONDS
    if that is more, while anybody decodes.
    cache_seed: whatever the KV values depend on beside the tokens (model, adapter, KV type).
    """

    num_blocks: int
    block_size: int = 32
    num_swap_slots: int = 0
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    prefill_mode: str = "mixed"
    decode_preference: float = 0.5
    max_step_seconds: float | None = None
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
        if self.prefill_mode not in PREFILL_MODES:
            raise ValueError(f"prefill_mode must be one of {', '.join(PREFILL_MODES)}, got {self.prefill_mode!r}")
        if not 0 <= self.decode_preference < 1:
            raise ValueError(f"decode_preference must be at least 0 and below 1, got {self.decode_preference}")
        if self.max_step_seconds is not None and not 0 <= self.max_step_seconds < math.inf:
            raise ValueError(f"max_step_seconds must not be negative, got {self.max_step_seconds}")
        if self.prefill_mode == "separate" and not self.decode_preference:
            raise ValueError("decode_preference 0 with separate steps would never decode while prompts wait")


@dataclass(frozen=True)
class SchedulerStats:
    """A snapshot. Counters (`total`) only grow; preempted and swapped sequences count as waiting."""

    running: int
    waiting: int
    blocks: BlockUsage
    swap: BlockUsage
    preemptions_total: int
    starvation_admissions_total: int
    blocks_copied_total: int
    blocks_swapped_out_total: int
    blocks_swapped_in_total: int
    prefix_hit_tokens_total: int
    prompt_tokens_total: int
