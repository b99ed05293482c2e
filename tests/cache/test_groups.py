"""Groups with windows: tables give back what no later token sees, and hits need no more than the last window."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.core.blocks.block_pool import BlockPool, OutOfBlocksError
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.groups import CacheGroups, blocks_for
from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.blocks.table_rows import TableRows

TOKENS = list(range(100, 164))


class Cache:
    """A pool of blocks of 4 tokens with a prefix cache, for groups with these windows."""

    def __init__(self, *windows: int | None, num_blocks: int = 64) -> None:
        self.groups = CacheGroups(windows, 4)
        self.pool: BlockPool[Any] = BlockPool(num_blocks, 4)
        self.prefix_cache = PrefixCache(self.pool, b"", self.groups)
        self.rows = TableRows()

    def table(self) -> BlockTable:
        return BlockTable(self.pool, self.rows, self.prefix_cache, self.groups)

    def keys(self, tokens: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        self.prefix_cache.extend_keys(keys, tokens, len(tokens))
        return keys

    def computed(self, tokens: list[int]) -> BlockTable:
        """A table of a sequence that has computed its tokens one by one."""
        table = self.table()
        for i in range(len(tokens)):
            table.grow(i + 1, i)
            table.publish(tokens, i + 1, self.keys(tokens))
        return table

    def hit(self, tokens: list[int]) -> int:
        """Tokens of the longest usable hit."""
        return 4 * self.prefix_cache.usable(self.prefix_cache.match(self.keys(tokens), tokens))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 16])
def test_a_group_holds_the_blocks_that_its_queries_see_and_at_most_one_more(window: int, chunk: int) -> None:
    groups = CacheGroups((window,), 4)
    for start in range(0, 60, chunk):
        first, end = groups.first_block(0, start), blocks_for(start + chunk, 4)
        assert 4 * first <= max(0, start - window + 1) < 4 * first + 4
        assert end - first <= groups.most_blocks(0, end, chunk) <= end
    assert groups.most_blocks(0, 1000, chunk) <= (window + chunk) // 4 + 2


def test_blocks_needed_and_most_tokens_are_inverse() -> None:
    groups = CacheGroups((None, 9, 9), 4)
    for num_blocks in range(1, 60):
        most = groups.most_tokens(num_blocks, 8, 200)
        assert groups.blocks_needed(most, 8) <= num_blocks or most == 0
        assert most == 200 or groups.blocks_needed(most + 1, 8) > num_blocks
    assert CacheGroups((9,), 4).most_tokens(5, 8, 10**6) == 10**6, "no length needs more"
    assert CacheGroups((9,), 4).most_tokens(4, 8, 10**6) == 16


@pytest.mark.parametrize("windows", [(), (0,), (None, -1)])
def test_groups_that_cannot_be_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="there must be a group, and windows must be positive"):
        CacheGroups(windows)


def test_a_table_keeps_all_blocks_of_full_layers_and_the_windows_of_the_others() -> None:
    cache = Cache(None, 6, 3)
    table = cache.computed(TOKENS)
    assert [len(ids) for ids in table.ids] == [16, 16, 16]
    assert table.firsts == [0, 14, 15]
    assert len(table) == len(table.block_ids) == 16 + 2 + 1 == cache.pool.usage().used
    selected = cache.rows.select(table.row_numbers)
    assert selected.tolist() == table.ids
    assert (selected[1, :14] == -1).all()
    table.release()
    assert cache.pool.usage().used == 0


def test_growth_that_fails_takes_nothing_and_keeps_what_later_tokens_see() -> None:
    cache = Cache(None, 4, num_blocks=6)
    table = cache.table()
    table.grow(12, 0)
    with pytest.raises(OutOfBlocksError):
        table.grow(20, 8)
    assert table.firsts == [0, 1], "the first block of the window had left it"
    assert cache.pool.num_free == 1
    table.grow(16, 12)
    assert (table.firsts, [len(ids) for ids in table.ids], cache.pool.num_free) == ([0, 2], [4, 4], 0)


def test_a_hit_shares_all_blocks_of_full_layers_and_only_the_last_window_of_the_others() -> None:
    cache = Cache(None, 6)
    first = cache.computed(TOKENS)
    cache.pool.evict(100)  # what left the window of the first
    assert cache.hit(TOKENS) == 64
    second = cache.table()
    second.adopt(cache.prefix_cache.match(cache.keys(TOKENS), TOKENS))
    assert second.firsts == [0, 14]
    assert second.block_ids == first.block_ids
    assert {cache.pool.ref_count(block) for block in second.block_ids} == {2}


def test_a_prefix_whose_last_window_is_gone_is_a_hit_up_to_where_a_window_is_whole() -> None:
    cache = Cache(None, 6)
    table = cache.computed(TOKENS)
    chain = list(table.chain)
    assert cache.hit(TOKENS[:40]) == 40, "blocks that left the window are cached"
    cache.pool.forget(chain[8].blocks[1])
    assert cache.hit(TOKENS[:40]) == 32
    assert cache.hit(TOKENS[:36]) == 32
    assert cache.hit(TOKENS[:44]) == 44, "the window of 6 tokens is in the two blocks after the lost one"
    cache.pool.forget(chain[7].blocks[0])
    assert cache.hit(TOKENS) == 28, "a block of a full layer ends every hit"


def test_blocks_that_left_a_window_are_evicted_before_others_unless_a_prompt_has_found_them() -> None:
    cache = Cache(None, 6)
    first = cache.computed(TOKENS)
    junction = cache.table()
    junction.adopt(cache.prefix_cache.match(cache.keys(TOKENS[:24]), TOKENS[:24]))
    junction.release()
    first.release()
    assert cache.pool.usage().cached == 32
    cache.pool.evict(12)
    assert cache.hit(TOKENS) == 64, "its end and the full layers' blocks are left"
    assert cache.hit(TOKENS[:24]) == 24, "and where another prompt went on"
    assert cache.hit(TOKENS[:40]) == 24


def test_a_recomputed_prefix_gets_back_the_blocks_that_it_lacks() -> None:
    cache = Cache(None, 6)
    cache.computed(TOKENS).release()
    cache.pool.evict(14)
    assert cache.hit(TOKENS[:40]) == 0
    again = cache.computed(TOKENS[:40])
    assert cache.hit(TOKENS[:40]) == 40
    assert len(cache.prefix_cache) == 16
    assert [cached.blocks[0] for cached in again.chain] != again.ids[0], "its own blocks of full layers stay private"


def test_with_windows_alone_a_hit_outlives_the_blocks_before_its_window() -> None:
    cache = Cache(6, 9)
    cache.computed(TOKENS).release()
    cache.pool.evict(2 * 16 - 2 - 3)
    assert cache.pool.usage().cached == 5
    assert cache.hit(TOKENS) == 64
    assert cache.hit(TOKENS[:60]) == 0
    cache.pool.evict(1)
    assert cache.hit(TOKENS) == 0
    cache.pool.evict(4)
    assert len(cache.prefix_cache) == 0, "the last block takes the records before it along"


def test_a_fork_needs_the_window_before_it() -> None:
    cache = Cache(None, 6)
    parent = cache.computed(TOKENS[:20])
    fork = cache.table()
    assert parent.can_fork(19)
    fork.fork(parent, 19)
    assert fork.firsts == [0, 3]
    assert fork.block_ids == [*parent.ids[0], *parent.ids[1][3:]]
    copies = fork.make_private(19)
    assert [source for source, _ in copies] == [parent.ids[0][4], parent.ids[1][4]]
    assert not fork.is_shared(19)
    parent.grow(22, 21)
    assert [parent.can_fork(length) for length in (20, 21)] == [False, True]


def test_unpublished_blocks_are_those_of_every_group_and_no_one_elses() -> None:
    cache = Cache(None, 6)
    first = cache.computed(TOKENS[:32])
    second = cache.table()
    second.adopt(cache.prefix_cache.match(cache.keys(TOKENS[:16]), TOKENS[:16]))
    for i in range(16, 24):
        second.grow(i + 1, i)
        second.publish([*TOKENS[:16], *range(8)], i + 1, cache.keys([*TOKENS[:16], *range(8)]))
    assert set(second.unpublish(4)) == {*second.ids[0][4:], *second.ids[1][4:]}
    assert cache.hit(TOKENS[:32]) == 32
    assert cache.hit([*TOKENS[:16], *range(8)]) == 16
    first.release()


@pytest.mark.parametrize("windows", [(6,), (6, 9), (None, 6)])
def test_blocks_that_left_a_window_are_unpublished_too(windows: tuple[int | None, ...]) -> None:
    """A step that writes them may fail after the next one has given them back."""
    cache = Cache(*windows)
    table = cache.table()
    table.grow(64, 0)
    table.publish(TOKENS, 64, cache.keys(TOKENS))
    written = {block for ids in table.ids for block in ids[2:]}
    table.grow(64, 63)
    assert len(table) < 16 * len(windows)
    assert cache.hit(TOKENS[:40]) == 40
    assert set(table.unpublish(2)) == written
    assert [cache.hit(TOKENS[:length]) for length in (8, 12, 40, 64)] == [8, 8, 8, 8]
