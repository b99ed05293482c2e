"""How many blocks, swap slots and checkpoints of recurrent states an engine has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.core.engine.prompt_logits import max_prompt_logits
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import CacheLayout, cache_layout, one_group
from mlxpaged.models.layers import StateMemory, bytes_per_token, is_per_sequence, keeps_states, state_bytes
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.invariant.device_tiles import device_tiles
from mlxpaged.parts.memory.fitting import (
    START_TOKENS,
    cached_blocks,
    drafting_sequences,
    kv_blocks,
    least_step,
    state_checkpoints,
    swap_slots,
)
from mlxpaged.parts.ranks.ranks import Ranks, least


@dataclass(frozen=True)
class Sizes:
    """bytes_per_block: of all layers. step_bytes: memory of the largest step. scheduler: its `cache_seed` is that of
    prefixes that are not stored. start_blocks: of each pool at the start."""

    layout: CacheLayout
    bytes_per_block: int
    step_bytes: int
    start_blocks: int
    scheduler: SchedulerConfig


def sizes_of(
    config: EngineConfig, served: ServedModel, step_bytes: int, beside_step: int, ranks: Ranks | None
) -> Sizes:
    """beside_step: bytes that the embedder and images take later. The rank with the least memory decides. Raises
    MemoryError."""
    per_state, own_caches = state_bytes(served.layers), is_per_sequence(served.layers)
    layout = one_group(served.kv_layers) if own_caches else cache_layout(served.kv_layers, served.max_model_len)
    groups = CacheGroups(layout.windows, config.block_size)
    per_block = (bytes_per_token(served.layers) if own_caches else layout.bytes_per_token) * config.block_size
    per_sequence = groups.blocks_needed(served.max_model_len, config.max_num_batched_tokens)
    num_checkpoints = 0
    if config.prefix_caching and not own_caches:
        most = config.max_num_seqs * per_sequence  # one for each block of the largest default pool
        num_checkpoints = least(min(most, state_checkpoints(per_state, config.state_cache_bytes)), ranks)
    states = StateMemory(per_state, config.max_num_seqs, num_checkpoints)
    step_bytes = max(step_bytes, least_step())
    memory = config.kv_cache_bytes, per_sequence, config.max_num_seqs, step_bytes + beside_step, states
    num_blocks = least(kv_blocks(per_block, *memory), ranks)
    at_start = groups.blocks_needed(min(START_TOKENS, served.max_model_len), config.max_num_batched_tokens)
    start_blocks = min(num_blocks, at_start) if per_block else num_blocks
    swaps = config.swap_space_bytes > 0 and per_block > 0 and not own_caches
    slots = least(swap_slots(per_block, config.swap_space_bytes), ranks) if swaps else 0
    scheduler = replace(
        config.scheduler_config(num_blocks, slots, cache_seed=f"{served.name}|{served.kv_type}".encode()),
        start_blocks=start_blocks,
        cached_blocks=cached_blocks(per_block, served.weight_bytes),
        windows=layout.windows,
        recurrent=keeps_states(served.layers),
        num_checkpoints=num_checkpoints,
        max_draft_states=drafting_sequences(per_state),
        swap_slots_per_state=-least(-per_state // per_block, ranks) if slots else 0,  # a block of rank 0 may be larger
        max_prompt_logits=max_prompt_logits(served.vocab_size, config.max_num_batched_tokens),
        tiles=device_tiles(served),
    )
    return Sizes(layout, per_block, step_bytes, start_blocks, scheduler)
