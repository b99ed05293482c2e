"""The blocks of one sequence, in order."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpaged.cache.block_pool import BlockPool
from mlxpaged.cache.prefix_cache import CachedBlock, PrefixCache
from mlxpaged.cache.table_rows import TableRows


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Maps a sequence's token positions to blocks: position p is in `block_ids[p // block_size]`.

    `grow` takes blocks when its sequence passes a boundary, not earlier. `publish` lets other sequences find full
    blocks. `release` frees all blocks; the empty table can grow again. row: index of its copy in `rows`, if any.
    """

    def __init__(self, pool: BlockPool[CachedBlock], rows: TableRows, prefix_cache: PrefixCache | None = None) -> None:
        self.block_ids: list[int] = []
        self.row: int | None = None
        self._pool = pool
        self._rows = rows
        self._prefix_cache = prefix_cache
        self.chain: list[CachedBlock] = []  # contents of the leading full blocks that are published or adopted

    def __len__(self) -> int:
        return len(self.block_ids)

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks that `grow(num_tokens)` would take."""
        return max(0, blocks_for(num_tokens, self._pool.block_size) - len(self.block_ids))

    def grow(self, num_tokens: int) -> None:
        """Have room for at least `num_tokens` tokens. Raises OutOfBlocksError, with nothing changed, if too few blocks
        are free."""
        missing = self.blocks_missing(num_tokens)
        if missing:
            self._put(len(self.block_ids), self._pool.allocate(missing))

    def _put(self, first: int, block_ids: list[int]) -> None:
        """Replace the entries from `first` on with `block_ids`."""
        if self.row is None:
            self.row = self._rows.take()
        self.block_ids[first:] = block_ids
        self._rows.write(self.row, first, block_ids)

    def adopt(self, hit: Sequence[CachedBlock]) -> None:
        """Share the blocks of a hit, after those of the chain. They replace the private blocks at their positions."""
        for cached in hit:
            self._pool.share(cached.block)
        first = len(self.chain)
        replaced = self.block_ids[first:]
        self._put(first, [cached.block for cached in hit])
        self.chain += hit
        self._pool.release(reversed(replaced))

    def fork(self, parent: BlockTable, num_tokens: int) -> None:
        """Fill an empty table with the parent's blocks of `num_tokens` tokens. The last one may be partly full."""
        if self.block_ids:
            raise ValueError("only an empty table can become a fork")
        self._put(0, parent.block_ids[: blocks_for(num_tokens, self._pool.block_size)])
        for block in self.block_ids:
            self._pool.share(block)
        self.chain = parent.chain[: num_tokens // self._pool.block_size]

    def is_shared(self, position: int) -> bool:
        """Whether the block of `position` has another owner. False if there is no such block yet."""
        index = position // self._pool.block_size
        return index < len(self.block_ids) and self._pool.ref_count(self.block_ids[index]) > 1

    def make_private(self, position: int) -> tuple[int, int]:
        """Replace the block of `position` with a new private block, for copy-on-write.

        Returns (source, target) of the copy that must happen before either is written. Raises OutOfBlocksError.
        """
        index = position // self._pool.block_size
        source = self.block_ids[index]
        [target] = self._pool.allocate(1)
        self._pool.release([source])
        self._put(index, [target, *self.block_ids[index + 1 :]])
        del self.chain[index:]
        return source, target

    def publish(self, token_ids: Sequence[int], num_tokens: int, keys: Sequence[bytes]) -> None:
        """Publish the full blocks of the first `num_tokens` tokens. keys: the hashes of all full blocks."""
        if self._prefix_cache is None:
            return
        size = self._pool.block_size
        for index in range(len(self.chain), num_tokens // size):
            parent = self.chain[-1] if self.chain else None
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            self.chain.append(self._prefix_cache.insert(keys[index], parent, tokens, self.block_ids[index]))

    def unpublish(self, num_full_blocks: int) -> list[int]:
        """Undo the publication of the blocks from `num_full_blocks` on, because their contents were not computed.

        Returns their ids. Other tables may have adopted them and must not keep them.
        """
        own = set(self.block_ids[num_full_blocks:])
        unpublished = [cached.block for cached in self.chain[num_full_blocks:] if cached.block in own]
        for block in unpublished:
            self._pool.forget(block)
        del self.chain[num_full_blocks:]
        return unpublished

    def release(self) -> None:
        """Free all blocks, the last first, so that the tail of a prefix is evicted before its head."""
        self._pool.release(reversed(self.block_ids))
        if self.row is not None:
            self._rows.release(self.row)
        self.block_ids, self.row = [], None
        self.chain = []
