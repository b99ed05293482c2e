"""Decides the greatest sizes of the KV pools, the recurrent states and the swap space, and what a step keeps free."""

from __future__ import annotations

import mlx.core as mx

from mlxpaged.core.scheduling.config import MOST_STATES
from mlxpaged.models.device_memory import default_device_memory, free_device_memory
from mlxpaged.models.layers import NO_STATES, StateMemory

LEAST_STEP = 10**9
"""Bytes that a GPU keeps free for a step, also if less was measured: a prompt chunk of 2,048 tokens of a model with 4
billion parameters takes about 0.8 GB."""

CACHE_LIMIT = 2**30
"""Most bytes of freed buffers that MLX keeps for later allocations. Without a limit MLX keeps up to 95 % of the GPU's
working set (mlx/backend/metal/allocator.cpp)."""

LOAD_CACHE = 2**24
"""The same while a model loads. What is freed then is weights that others have replaced: nothing takes them again."""

CPU_POOL = 2**30
"""Most bytes of the KV pools on a CPU by default."""

CPU_CACHED, CPU_CACHED_SHARE = 2**27, 0.25
"""On a CPU, the pools grow for cached blocks up to the larger of these: bytes, and a share of the weights' bytes."""

START_TOKENS = 512
"""Tokens that the KV pools hold at the start: a short request with its answer.
That is 75 MB for Qwen3-4B. The pools grow before they are full."""

STATE_CACHE_SHARE = 0.1
"""Share of the free memory that checkpoints of recurrent states take by default."""

STATE_CACHE = 2 * 2**30
"""Most bytes of these checkpoints by default: 13 of Qwen3.5-27B, 147 MiB each."""


MOST_DRAFT_STATES = 2**30
"""Most bytes that states before rows with drafts take in a step, with those that replace the states after them."""

DRAFT_STATES_SHARE = 32
"""They take at most the free memory divided by this: 0.5 GB of 16 GB."""


def limit_freed_buffers(step_bytes: int, loading: bool = False) -> None:
    """Let MLX keep the freed buffers of one step, which the next step takes again, and at most CACHE_LIMIT. loading:
    whether a model loads."""
    mx.set_cache_limit(min(LOAD_CACHE if loading else CACHE_LIMIT, step_bytes))


def least_step() -> int:
    """Bytes that are kept free for a step whatever was measured."""
    return LEAST_STEP if mx.metal.is_available() else 0


def kv_blocks(
    bytes_per_block: int,
    wanted_bytes: int | None,
    blocks_per_sequence: int,
    max_num_seqs: int,
    reserved_bytes: int = 0,
    states: StateMemory = NO_STATES,
) -> int:
    """The most blocks that the KV pools may have.

    wanted_bytes: the configured size. If it is None, the pools take what `default_device_memory` leaves, but no more
    than `max_num_seqs` sequences of `blocks_per_sequence` (the longest that is served) fill. Without a GPU they take no
    more than CPU_POOL, or one such sequence if that is larger. reserved_bytes: memory that a step and the embedder take
    later. states: what the recurrent states take later. Raises MemoryError if the states do not fit, if not even one
    block fits, or if more is wanted than is free.
    """
    free = free_device_memory()
    left = max(0, free - reserved_bytes)
    if states.nbytes > left:
        raise MemoryError(f"the recurrent states do not fit: {left / 1e6:.1f} MB are free{states.remedy}")
    taken = reserved_bytes + states.nbytes
    left -= states.nbytes
    if wanted_bytes is not None:
        if wanted_bytes > left:
            kept = f" beside {reserved_bytes / 1e9:.1f} GB for a step and embeddings" if reserved_bytes else ""
            message = f"--kv-cache-memory is {wanted_bytes / 1e9:.1f} GB, but only {left / 1e9:.1f} GB are free{kept}"
            raise MemoryError(message + states.remedy)
        blocks = wanted_bytes // bytes_per_block if bytes_per_block else max_num_seqs * blocks_per_sequence
        limit = f"--kv-cache-memory is {wanted_bytes / 1e6:.1f} MB"
    else:
        left = max(0, min(left, default_device_memory() - taken))
        blocks = min(left // max(1, bytes_per_block), max_num_seqs * blocks_per_sequence)
        if not mx.metal.is_available() and bytes_per_block:
            blocks = min(blocks, max(CPU_POOL // bytes_per_block, blocks_per_sequence))
        limit = f"only {left / 1e6:.1f} MB are left for KV after the weights"
    if blocks < 1:
        message = f"no KV block fits: {limit}, but one block takes {bytes_per_block / 1e6:.1f} MB"
        raise MemoryError(message if wanted_bytes is not None else message + states.remedy)
    return blocks


def cached_blocks(bytes_per_block: int, weight_bytes: int) -> int | None:
    """The blocks to which the KV pools grow at most for blocks that are only cached; None for no limit of its own. A
    CPU has the memory of all programs, and computes a small model's prompt soon."""
    if mx.metal.is_available() or not bytes_per_block:
        return None
    return max(CPU_CACHED, int(CPU_CACHED_SHARE * weight_bytes)) // bytes_per_block


def state_checkpoints(bytes_per_state: int, wanted_bytes: int | None) -> int:
    """Number of recurrent states that are kept for the prefix cache, 0 if the model has none. wanted_bytes: the
    configured size; None for STATE_CACHE_SHARE of the free memory, and STATE_CACHE at most."""
    if not bytes_per_state:
        return 0
    if wanted_bytes is None:
        wanted_bytes = min(STATE_CACHE, int(STATE_CACHE_SHARE * free_device_memory()))
    return wanted_bytes // bytes_per_state


def drafting_sequences(bytes_per_state: int) -> int:
    """The most sequences of a step that have drafts: MOST_STATES, or fewer if their states are large. Each keeps two of
    them. bytes_per_state: 0 if the model has none."""
    if not bytes_per_state:
        return MOST_STATES
    room = min(MOST_DRAFT_STATES, free_device_memory() // DRAFT_STATES_SHARE)
    return max(1, min(MOST_STATES, room // (2 * bytes_per_state)))


def swap_slots(bytes_per_block: int, wanted_bytes: int) -> int:
    """Number of slots of the swap space; each holds one KV block of all layers. Raises MemoryError if none fits."""
    slots = wanted_bytes // bytes_per_block
    if slots < 1:
        raise MemoryError(
            f"--swap-space is {wanted_bytes / 1e6:.1f} MB, but one KV block takes {bytes_per_block / 1e6:.1f} MB"
        )
    return slots
