"""The blocks of one sequence, in order."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpaged.cache.block_pool import BlockPool
from mlxpaged.cache.prefix_cache import CachedBlock, PrefixCache, PrefixHit
from mlxpaged.cache.table_rows import TableRows


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens fill: ceil(num_tokens / block_size)."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Maps a sequence's token positions to blocks: position p lives in `block_ids[p // block_size]`.

    The table takes blocks when its sequence grows past a boundary and never ahead of need. `publish` makes its full
    blocks findable by other sequences; `release` gives everything back and leaves an empty table that can grow again.

    `row`: its place in `rows`, where the same ids stand while it has any.
    """

    def __init__(self, pool: BlockPool[CachedBlock], rows: TableRows, prefix_cache: PrefixCache | None = None) -> None:
        self.block_ids: list[int] = []
        self.row: int | None = None
        self._pool = pool
        self._rows = rows
        self._prefix_cache = prefix_cache
        self._chain: list[CachedBlock] = []  # what the leading full blocks contain, as far as published or adopted

    def __len__(self) -> int:
        return len(self.block_ids)

    def blocks_missing(self, num_tokens: int) -> int:
        """Blocks that `grow(num_tokens)` would take."""
        return max(0, blocks_for(num_tokens, self._pool.block_size) - len(self.block_ids))

    def grow(self, num_tokens: int) -> None:
        """Hold at least `num_tokens` tokens. Raises OutOfBlocksError and changes nothing where blocks run out."""
        missing = self.blocks_missing(num_tokens)
        if missing:
            self._put(len(self.block_ids), self._pool.allocate(missing))

    def _put(self, first: int, block_ids: list[int]) -> None:
        """Whatever stood there from entry `first` on, the table ends with `block_ids` now."""
        if self.row is None:
            self.row = self._rows.take()
        self.block_ids[first:] = block_ids
        self._rows.write(self.row, first, block_ids)

    @property
    def chain(self) -> Sequence[CachedBlock]:
        """What its leading full blocks contain, as far as they were published or adopted."""
        return self._chain

    def adopt(self, hit: PrefixHit) -> None:
        """Take shared blocks over, behind those of the chain and in the place of whatever private ones were there."""
        for cached in hit.blocks:
            self._pool.share(cached.block)
        first = len(self._chain)
        replaced = self.block_ids[first:]
        self._put(first, [cached.block for cached in hit.blocks])
        self._chain += hit.blocks
        self._pool.release(reversed(replaced))

    def fork(self, parent: BlockTable, num_tokens: int) -> None:
        """Start an empty table with the parent's blocks of `num_tokens` tokens; the last one may be partly full."""
        if self.block_ids:
            raise ValueError("only an empty table can become a fork")
        self._put(0, parent.block_ids[: blocks_for(num_tokens, self._pool.block_size)])
        for block in self.block_ids:
            self._pool.share(block)
        self._chain = parent._chain[: num_tokens // self._pool.block_size]

    def is_shared(self, position: int) -> bool:
        """Whether the block that holds `position` has another owner; False where there is no such block yet."""
        index = position // self._pool.block_size
        return index < len(self.block_ids) and self._pool.ref_count(self.block_ids[index]) > 1

    def make_private(self, position: int) -> tuple[int, int]:
        """Put a block of its own in the place of the one that holds `position`, for copy-on-write.

        Returns (source, target) of the copy that must happen before either is written. Raises OutOfBlocksError.
        """
        index = position // self._pool.block_size
        source = self.block_ids[index]
        [target] = self._pool.allocate(1)
        self._pool.release([source])
        self._put(index, [target, *self.block_ids[index + 1 :]])
        del self._chain[index:]
        return source, target

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
        if self.row is not None:
            self._rows.give_back(self.row)
        self.block_ids, self.row = [], None
        self._chain = []
