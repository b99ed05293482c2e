"""The configuration of a scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles

MOST_STATES = 8
"""Most sequences with drafts in a step of a model with recurrent states: the states before their rows are kept, which
take 154 MB each in Qwen3.5-27B."""

MOST_MULTIPLE = 4
READING_SECONDS = 0.1
"""How long a step may take in a flood of prompts: this many times as long as one without, or these seconds. Readers
read about ten tokens a second, and prompts get the rest."""


def step_multiple(num_prompts: int) -> int:
    """Returns how many times as long as a step without prompts a step with prompts may take on average while so many
    wait. One prompt gets half of the device's time. The more there are, the more they get."""
    return min(MOST_MULTIPLE, 1 + num_prompts)


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and policy of a scheduler. Raises ValueError for values out of range."""

    num_blocks: int
    """Most KV blocks of the pool."""
    start_blocks: int | None = None
    """KV blocks of the pool at the start. None: `num_blocks`."""
    cached_blocks: int | None = None
    """KV blocks to which the pool grows at most for blocks that are only cached. None: `num_blocks`."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens per KV block."""
    windows: tuple[int | None, ...] = (None,)
    """Windows of the cache groups: the keys that a query of its layers sees; None for all."""
    num_swap_slots: int = 0
    """KV blocks that the swap space holds. 0: no swap space."""
    recurrent: bool = False
    """Whether layers keep a recurrent state: a prefix hit then ends at a checkpoint."""
    num_checkpoints: int = 0
    """Recurrent states that are kept for the prefix cache, each of one sequence."""
    max_draft_states: int = MOST_STATES
    """Sequences of a step that have drafts, if layers keep states."""
    swap_slots_per_state: int = 0
    """Swap slots that the recurrent state of one sequence takes."""
    max_num_seqs: int = 32
    """Sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_prompt_logits: int = 2048
    """Prompt tokens of a step whose logits are computed, for prompt log-probabilities, and draft tokens, which take
    at most half. It limits the step's memory."""
    decode_preference: float = 0.5
    """0 to below 1: share of the token budget that prompts may not use while sequences decode."""
    max_step_seconds: float | None = None
    """Time limit of a step with prompts. It never cuts a chunk below LEAST_CHUNK tokens. 0: no limit. None: while
    sequences decode, `step_multiple` times a step without prompts."""
    tiles: RowTiles = ANY_ROWS
    """The tiles in which a step's rows are computed. Chunks that are cut fill their last tile."""
    prefix_caching: bool = True
    """Whether blocks are shared between sequences with equal prefixes."""
    cache_seed: bytes = b""
    """All that KV values depend on, except the tokens: the model and the KV type."""

    @property
    def groups(self) -> CacheGroups:
        return CacheGroups(self.windows, self.block_size)

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token a step"
            )
        if self.max_prompt_logits < 1:
            raise ValueError(f"max_prompt_logits must be at least 1, got {self.max_prompt_logits}")
        if not 0 <= self.decode_preference < 1:
            raise ValueError(f"decode_preference must be at least 0 and below 1, got {self.decode_preference}")
        if self.max_step_seconds is not None and not 0 <= self.max_step_seconds < math.inf:
            raise ValueError(f"max_step_seconds must be at least 0 and finite, got {self.max_step_seconds}")
