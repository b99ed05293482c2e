"""The blocks of one sequence, in order."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpaged.cache.block_pool import BlockPool
from mlxpaged.cache.prefix_cache import CachedBlock, PrefixCache, PrefixHit


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Maps a sequence's token positions to blocks: position p lives in `block_ids[p // block_size]`.

    The table takes blocks when its sequence grows past a boundary and never ahead of need. `publish` makes its full
    blocks findable by other sequences; `release` gives everything back and leaves an empty table that can grow again.
    """

    def __init__(self, pool: BlockPool[CachedBlock], prefix_cache: PrefixCache | None = None) -> None:
        self.block_ids: list[int] = []
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._chain: list[CachedBlock] = []  # what the leading full blocks contain, as far as published or adopted

    def __len__(self) -> int:
        return len(self.block_ids)

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks that `grow(num_tokens)` would take."""
        return max(0, blocks_for(num_tokens, self._pool.block_size) - len(self.block_ids))

    def grow(self, num_tokens: int) -> None:
        """Hold at least `num_tokens` tokens. Raises OutOfBlocksError and changes nothing where blocks run out."""
        self.block_ids += self._pool.allocate(self.blocks_missing(num_tokens))

    def adopt(self, hit: PrefixHit) -> None:
        """Start an empty table with shared blocks."""
        if self.block_ids:
            raise ValueError("only an empty table can adopt a prefix")
        for cached in hit.blocks:
            self._pool.share(cached.block)
        self._chain = list(hit.blocks)
        self.block_ids = [cached.block for cached in hit.blocks]

    def publish(self, token_ids: Sequence[int], num_tokens: int, keys: Sequence[bytes]) -> None:
        """Make the full blocks of the first `num_tokens` tokens findable. `keys` are the hashes of all full blocks."""
        if self._prefix_cache is None:
            return
        size = self._pool.block_size
        for index in range(len(self._chain), num_tokens // size):
            parent = self._chain[-1] if self._chain else None
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            self._chain.append(self._prefix_cache.insert(keys[index], parent, tokens, self.block_ids[index]))

    def retract(self, num_full_blocks: int) -> list[int]:
        """Undo the publication of every block from `num_full_blocks` on: what they hold was never computed.

        Returns the block ids that other tables may have adopted in the meantime and must not keep.
        """
        own = set(self.block_ids[num_full_blocks:])
        retracted = [cached.block for cached in self._chain[num_full_blocks:] if cached.block in own]
        for block in retracted:
            self._pool.forget(block)
        del self._chain[num_full_blocks:]
        return retracted

    def release(self) -> None:
        """Give every block back, the tail first, so that the tail of a prefix is evicted before its head."""
        self._pool.release(reversed(self.block_ids))
        self.block_ids = []
        self._chain = []
