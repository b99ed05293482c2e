"""Decides the sizes of the KV pools and the swap space."""

from __future__ import annotations

import logging
import re
import sys
from decimal import Decimal

import mlx.core as mx

from mlxpaged.models.device_memory import free_device_memory

logger = logging.getLogger(__name__)

WORKING_MEMORY = 0.15
"""Share of the free memory that is left for activations and the rest of the process."""

SYSTEM_SHARE = 0.5
"""Share of the system's free memory that the pools may take if there is no GPU with a working-set limit."""

CPU_POOL = 2**30
"""Bytes of the default KV pools on a CPU. All of them are written at the start, at 3 s per GB on two cores."""


STATE_CACHE_SHARE = 0.1
STATE_CACHE = 2 * 2**30
"""The default for checkpoints of recurrent states: 13 of Qwen3.5-27B (147 MiB each), 8 of Qwen3.5-4B on an 8 GB Mac."""


def parse_size(text: str) -> int:
    """Bytes of "512MB", "8GB", "1.5GiB" or a plain number of bytes. KB is 1,000 bytes, KiB is 1,024.

    Raises ValueError for other texts.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?)B)?\s*", text.upper())
    size = 0
    if match is not None:
        unit = 1024 if match[3] else 1000
        size = int(Decimal(match[1]) * unit ** (" KMGT".index(match[2] or " ")))
    if not 1 <= size <= sys.maxsize:
        raise ValueError(f"not a memory size: {text!r}; write for example 512MB or 8GB")
    return size


def wire_device_memory() -> None:
    """Keep weights and KV pools resident on a GPU that shares the system's memory, up to its working-set limit.

    Otherwise macOS pages them out while the server is idle, and the next request is slow. Before macOS 15 the limit has
    no effect. A limit that MLX refuses is only logged.
    """
    if mx.metal.is_available():
        try:
            mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        except (RuntimeError, ValueError) as error:
            logger.warning("the model's memory is not wired: %s", error)


def kv_blocks(
    bytes_per_block: int, wanted_bytes: int | None, blocks_per_sequence: int, max_num_seqs: int, reserved_bytes: int = 0
) -> int:
    """Number of blocks of the KV pools.

    wanted_bytes: the configured size. If it is None, the pools take what the device has left, less WORKING_MEMORY, but
    no more than `max_num_seqs` sequences of `blocks_per_sequence` (the full context length) fill. Without a GPU they
    take no more than CPU_POOL, or one such sequence if that is larger. reserved_bytes: memory that the embedder takes
    later. Raises MemoryError if not even one block fits, or if more is wanted than is free.
    """
    left = max(0, free_device_memory() - reserved_bytes)
    if wanted_bytes is not None:
        if wanted_bytes > left:
            message = f"--kv-cache-memory is {wanted_bytes / 1e9:.1f} GB, but only {left / 1e9:.1f} GB are free"
            raise MemoryError(message)
        blocks = wanted_bytes // bytes_per_block if bytes_per_block else max_num_seqs * blocks_per_sequence
        limit = f"--kv-cache-memory is {wanted_bytes / 1e6:.1f} MB"
    else:
        on_gpu = mx.metal.is_available()
        free = int(left * (1.0 if on_gpu else SYSTEM_SHARE) * (1 - WORKING_MEMORY))
        blocks = min(free // max(1, bytes_per_block), max_num_seqs * blocks_per_sequence)
        if not on_gpu and bytes_per_block:
            blocks = min(blocks, max(CPU_POOL // bytes_per_block, blocks_per_sequence))
        limit = f"only {free / 1e6:.1f} MB are left for KV after the weights"
    if blocks < 1:
        raise MemoryError(f"no KV block fits: {limit}, but one block takes {bytes_per_block / 1e6:.1f} MB")
    return blocks


def state_checkpoints(bytes_per_state: int, wanted_bytes: int | None) -> int:
    """Number of recurrent states that are kept for the prefix cache, 0 if the model has none. wanted_bytes: the
    configured size; None for STATE_CACHE_SHARE of the free memory, and STATE_CACHE at most."""
    if not bytes_per_state:
        return 0
    if wanted_bytes is None:
        wanted_bytes = min(STATE_CACHE, int(STATE_CACHE_SHARE * free_device_memory()))
    return wanted_bytes // bytes_per_state


def swap_slots(bytes_per_block: int, wanted_bytes: int) -> int:
    """Number of slots of the swap space; each holds one KV block of all layers. Raises MemoryError if none fits."""
    slots = wanted_bytes // bytes_per_block
    if slots < 1:
        raise MemoryError(
            f"--swap-space is {wanted_bytes / 1e6:.1f} MB, but one KV block takes {bytes_per_block / 1e6:.1f} MB"
        )
    return slots
