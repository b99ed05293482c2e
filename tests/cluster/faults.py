"""Faults of rank 1. Each is called in its process, before its engine is made."""

from __future__ import annotations

import itertools

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.cluster.follower import Follower
from mlxpaged.engine import sizes


def fail_in_a_step() -> None:
    """The twentieth step cannot be built."""
    perform, steps = Follower.perform, itertools.count()

    def failing(follower: Follower, message: bytes) -> None:
        if message.startswith(b'["run"') and next(steps) == 20:
            raise RuntimeError("injected")
        perform(follower, message)

    Follower.perform = failing  # type: ignore[method-assign]


def have_little_memory() -> None:
    """There is room for fewer blocks, checkpoints and slots than rank 0 has."""
    for name, value in {"kv_blocks": 31, "state_checkpoints": 5, "swap_slots": 7}.items():
        setattr(sizes, name, lambda *_, value=value: value)


def lack_memory() -> None:
    """The first two pools that grow do not find the memory."""
    resize, calls = LayerKVCache.resize, itertools.count()

    def failing(pool: LayerKVCache, num_blocks: int) -> None:
        if next(calls) in (1, 4):
            raise MemoryError("injected")
        resize(pool, num_blocks)

    LayerKVCache.resize = failing  # type: ignore[method-assign]
