"""The size of the KV pool: how many blocks there are, how many there may be, and how many more are needed.

The scheduler asks for a larger pool before it evicts cached blocks, preempts a sequence or lets one wait. The engine
resizes the memory between steps and then changes the size here.
"""

from __future__ import annotations

import math

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.prefix_cache import Content

FULL = 0.85
"""If used and cached blocks fill more than this share of the pool, it grows. If it cannot, the least recently used
cached blocks are evicted."""

GROWTH = 2
"""The pool grows to at least this many times its size: each layer's blocks are copied, so small steps would cost
more."""


class PoolSize:
    """limit: the most blocks that the pool may have. cached_limit: the most to which it grows for blocks that are only
    cached; None for `limit`. may_grow: false while there is no memory."""

    def __init__(self, pool: BlockPool[Content], limit: int, cached_limit: int | None = None) -> None:
        self._pool = pool
        self.limit = limit
        self._cached_limit = limit if cached_limit is None else min(limit, cached_limit)
        self.may_grow = True
        self.missing = 0  # the most blocks that were asked for since the last step began

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def can_grow(self) -> bool:
        return self.may_grow and self.num_blocks < self.limit

    def allow_growth(self, allowed: bool) -> None:
        self.may_grow = allowed

    def forget_asked(self) -> None:
        """No sequence waits for blocks."""
        self.missing = 0

    def ask(self, missing: int) -> None:
        """Ask for a pool with `missing` blocks more."""
        self.missing = max(self.missing, missing)

    @property
    def wanted(self) -> int:
        """The size that the pool should have."""
        if not self.missing or not self.can_grow:
            return self.num_blocks
        return min(self.limit, max(GROWTH * self.num_blocks, math.ceil((self.num_blocks + self.missing) / FULL)))

    def grow(self, num_blocks: int) -> None:
        """The memory now has `num_blocks` blocks."""
        self._pool.grow(num_blocks)
        self.missing = 0

    def relieve(self) -> None:
        """Ask for a larger pool or evict cached blocks if the pool is filled beyond FULL."""
        usage, most = self._pool.usage(), int(FULL * self.num_blocks)
        excess = usage.used + usage.cached - most
        if excess <= 0:
            return
        cached_may_stay = self._cached_limit == self.limit or GROWTH * self.num_blocks <= self._cached_limit
        if self.can_grow and (usage.used > most or cached_may_stay):
            self.ask(excess)
        else:
            self._pool.evict(excess)
