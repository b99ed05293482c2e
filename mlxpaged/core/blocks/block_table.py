"""The blocks of one sequence, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.groups import ONE_GROUP, CacheGroups, blocks_for
from mlxpaged.core.blocks.prefix_cache import UNKNOWN, CachedBlock, Content, Origin, PrefixCache
from mlxpaged.core.blocks.table_rows import UNUSED, TableRows


class BlockTable:
    """Maps a sequence's token positions to blocks: for group g, position p is in `ids[g][p // block_size]`.

    `grow` takes blocks when its sequence passes a boundary, not earlier, and gives back those that left a window: their
    entries are UNUSED. `publish` lets other sequences find full blocks. `release` frees all blocks; the empty table can
    grow again. firsts: for each group, the index of the first block that the table holds. row_numbers: its copies in
    `rows`, one for each group. prompt_end: a number of tokens after which other prompts often go on.
    """

    def __init__(
        self,
        pool: BlockPool[Content],
        rows: TableRows,
        prefix_cache: PrefixCache | None = None,
        groups: CacheGroups = ONE_GROUP,
        prompt_end: int = 0,
    ) -> None:
        self.row_numbers: list[int] = []
        self.chain: list[CachedBlock] = []  # contents of the leading full blocks that are published or adopted
        self._pool = pool
        self._rows = rows
        self._prefix_cache = prefix_cache
        self._groups = groups
        self._prompt_end = prompt_end
        self._clear()

    def _clear(self) -> None:
        self.ids: list[list[int]] = [[] for _ in self._groups.windows]
        self.firsts = [0] * len(self._groups)

    @property
    def block_ids(self) -> list[int]:
        """All blocks that it holds, group after group."""
        return [block for ids, first in zip(self.ids, self.firsts, strict=True) for block in ids[first:]]

    def __len__(self) -> int:
        """Blocks that it holds."""
        return len(self.ids[0]) * len(self._groups) - sum(self.firsts)

    def blocks_missing(self, num_tokens: int, start: int = 0) -> int:
        """Blocks that `grow` would take."""
        filled, end = len(self.ids[0]), blocks_for(num_tokens, self._pool.block_size)
        if end <= filled:
            return 0
        firsts = (self._groups.first_block(group, start) for group in range(len(self._groups)))
        return sum(end - min(end, max(filled, first)) for first in firsts)

    def grow(self, num_tokens: int, start: int = 0) -> None:
        """Have room for at least `num_tokens` tokens. Those before `start` are computed, so blocks that no later token
        sees are given back. Raises OutOfBlocksError, with nothing taken, if too few blocks are free."""
        self.give_back(start)
        missing = self.blocks_missing(num_tokens, start)
        end = blocks_for(num_tokens, self._pool.block_size)
        new = iter(self._pool.allocate(missing))
        filled = len(self.ids[0])
        for group in range(len(self._groups)) if end > filled else ():
            first = min(end, max(filled, self._groups.first_block(group, start)))
            if first > filled:
                self.firsts[group] = first
            self._put(group, filled, [*[UNUSED] * (first - filled), *(next(new) for _ in range(first, end))])

    def give_back(self, position: int) -> None:
        """Release the blocks that no query at `position` or later sees."""
        if self._groups.keeps_all:
            return
        for group, ids in enumerate(self.ids):
            begin = self.firsts[group]
            end = min(len(ids), self._groups.first_block(group, position))
            if end > begin:
                kept = range(
                    self._groups.first_block(group, self._prompt_end), self._prompt_end // self._pool.block_size
                )
                self._pool.release((ids[i] for i in range(begin, end) if i not in kept), passed=True)
                self._pool.release(ids[i] for i in range(begin, end) if i in kept)
                ids[begin:end] = [UNUSED] * (end - begin)
                self._rows.clear(self.row_numbers[group], begin, end)
                self.firsts[group] = end

    def _put(self, group: int, first: int, block_ids: list[int]) -> None:
        """Replace the entries from `first` on with `block_ids`."""
        if not self.row_numbers:
            self.row_numbers = [self._rows.take() for _ in self.ids]
        self.ids[group][first:] = block_ids
        self._rows.write(self.row_numbers[group], first, block_ids)

    def adopt(self, hit: Sequence[CachedBlock]) -> None:
        """Share the blocks of a hit, after those of the chain. They replace the private blocks at their positions, and
        later positions. In a group with a window, only those that the next token sees are shared; all must be there."""
        known, self.chain = len(self.chain), [*self.chain, *hit]
        end = len(self.chain)
        for group, ids in enumerate(self.ids):
            first, held = self._groups.first_block(group, end * self._pool.block_size), self.firsts[group]
            kept = range(max(first, held), known)
            new = [ids[i] if i in kept else self.chain[i].blocks[group] for i in range(first, end)]
            for i, block in enumerate(new, first):
                if i not in kept:
                    self._pool.share(block)
            replaced = [ids[i] for i in reversed(range(held, len(ids))) if i not in kept]
            self._put(group, 0, [*[UNUSED] * first, *new])
            self.firsts[group] = first
            self._pool.release(replaced)

    def copy_in(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Take a private block for each group, for a copy of one that follows those of the chain.

        Returns (source, target) of the copies that must happen before either is written. Raises OutOfBlocksError.
        """
        targets = self._pool.allocate(len(blocks))
        for group, target in enumerate(targets):
            self._put(group, len(self.chain), [target])
        return list(zip(blocks, targets, strict=True))

    def can_fork(self, num_tokens: int) -> bool:
        """Whether it still holds all blocks that a fork of `num_tokens` tokens needs."""
        return all(first <= self._groups.first_block(group, num_tokens) for group, first in enumerate(self.firsts))

    def fork(self, parent: BlockTable, num_tokens: int) -> None:
        """Fill an empty table with the parent's blocks of `num_tokens` tokens. The last one may be partly full."""
        if self.ids[0]:
            raise ValueError("only an empty table can become a fork")
        end = blocks_for(num_tokens, self._pool.block_size)
        for group, ids in enumerate(parent.ids):
            first = self._groups.first_block(group, num_tokens)
            self._put(group, 0, [*[UNUSED] * first, *ids[first:end]])
            self.firsts[group] = first
            for block in ids[first:end]:
                self._pool.share(block)
        self.chain = parent.chain[: num_tokens // self._pool.block_size]

    def is_shared(self, position: int) -> bool:
        """Whether the block of `position` has another owner, which is so in all groups or in none: only a fork shares
        a block that is not full. False if there is no such block yet."""
        index, ids = position // self._pool.block_size, self.ids[0]
        return index < len(ids) and self._pool.ref_count(ids[index]) > 1

    def make_private(self, position: int) -> list[tuple[int, int]]:
        """Replace the block of `position` in every group with a new private block, for copy-on-write.

        Returns (source, target) of the copies that must happen before either is written. Raises OutOfBlocksError.
        """
        index = position // self._pool.block_size
        sources = [ids[index] for ids in self.ids]
        targets = self._pool.allocate(len(sources))
        self._pool.release(sources)
        for group, target in enumerate(targets):
            self._put(group, index, [target, *self.ids[group][index + 1 :]])
        del self.chain[index:]
        return list(zip(sources, targets, strict=True))

    def publish(
        self, token_ids: Sequence[int], num_tokens: int, keys: Sequence[bytes], origin: Origin = UNKNOWN
    ) -> None:
        """Publish the full blocks of the first `num_tokens` tokens. keys: the hashes of all full blocks."""
        if self._prefix_cache is None:
            return
        size = self._pool.block_size
        for index in range(len(self.chain), num_tokens // size):
            parent = self.chain[-1] if self.chain else None
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            blocks = [ids[index] for ids in self.ids]
            self.chain.append(self._prefix_cache.insert(keys[index], parent, tokens, blocks, origin))

    def unpublish(self, num_full_blocks: int) -> list[int]:
        """Undo the publication of the blocks from `num_full_blocks` on, because their contents were not computed.

        Blocks that have already left a window are included. The table no longer knows which these were, so a block of
        another sequence may be unpublished in their place. Returns their ids. Other tables may have adopted them and
        must not keep them.
        """
        unpublished = [
            block
            for index, cached in enumerate(self.chain[num_full_blocks:], num_full_blocks)
            for ids, block in zip(self.ids, cached.blocks, strict=True)
            if block != UNUSED and ids[index] in (block, UNUSED)
        ]
        for block in unpublished:
            self._pool.forget(block)
        del self.chain[num_full_blocks:]
        return unpublished

    def rename(self, moves: Mapping[int, int]) -> None:
        """Its blocks were copied to others: source to target."""
        for group, ids in enumerate(self.ids):
            if not moves.keys().isdisjoint(ids):
                self._put(group, 0, [moves.get(block, block) for block in ids])

    def release(self) -> None:
        """Free all blocks, the last first, so that the tail of a prefix is evicted before its head."""
        held = [(i, group) for group, first in enumerate(self.firsts) for i in range(first, len(self.ids[group]))]
        self._pool.release(self.ids[group][i] for i, group in sorted(held, reverse=True))
        for row in self.row_numbers:
            self._rows.release(row)
        self.row_numbers, self.chain = [], []
        self._clear()
