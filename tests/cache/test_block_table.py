"""Tables grow at block boundaries, share prefixes and give everything back."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.core.blocks.block_pool import BlockPool, OutOfBlocksError
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.groups import blocks_for
from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.blocks.table_rows import TableRows


def make(num_blocks: int = 16, block_size: int = 4) -> tuple[BlockPool[Any], PrefixCache]:
    pool: BlockPool[Any] = BlockPool(num_blocks, block_size)
    return pool, PrefixCache(pool)


def fill(table: BlockTable, cache: PrefixCache, tokens: list[int]) -> None:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens, len(tokens))
    table.grow(len(tokens))
    table.publish(tokens, len(tokens), keys)


def test_growth_by_single_tokens_takes_a_block_at_each_boundary() -> None:
    pool, _ = make(block_size=4)
    table = BlockTable(pool, TableRows())
    sizes = []
    for length in range(1, 18):
        table.grow(length)
        sizes.append(len(table))
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5]


def test_growth_to_n_tokens_takes_ceil_n_over_32_blocks() -> None:
    for n in range(1, 201):
        pool: BlockPool[Any] = BlockPool(8)
        table = BlockTable(pool, TableRows())
        table.grow(n)
        assert len(table) == -(-n // 32) == blocks_for(n, 32)


def test_growth_beyond_the_pool_changes_nothing() -> None:
    pool, _ = make(num_blocks=2)
    table = BlockTable(pool, TableRows())
    table.grow(4)
    with pytest.raises(OutOfBlocksError):
        table.grow(16)
    assert (len(table), pool.num_free) == (1, 1)


def test_release_frees_the_tail_first_so_that_it_is_evicted_before_the_head() -> None:
    pool, cache = make(num_blocks=3)
    table = BlockTable(pool, TableRows(), cache)
    fill(table, cache, list(range(12)))
    head, middle, tail = table.block_ids
    table.release()
    assert pool.usage().cached == 3
    assert pool.allocate(3) == [tail, middle, head]


def test_publish_offers_full_blocks_only_and_each_once() -> None:
    pool, cache = make()
    table = BlockTable(pool, TableRows(), cache)
    fill(table, cache, list(range(10)))
    assert [pool.content(block) is not None for block in table.block_ids] == [True, True, False]
    fill(table, cache, list(range(10)))
    assert len(cache) == 2


def test_adopted_blocks_are_shared_with_a_reference_count_of_two() -> None:
    pool, cache = make()
    first = BlockTable(pool, TableRows(), cache)
    fill(first, cache, list(range(10)))
    keys: list[bytes] = []
    cache.extend_keys(keys, list(range(10)), 10)
    second = BlockTable(pool, TableRows(), cache)
    second.adopt(cache.match(keys, list(range(10))))
    assert second.block_ids == first.block_ids[:2]
    assert [pool.ref_count(block) for block in second.block_ids] == [2, 2]


def test_adopted_blocks_follow_the_chain_and_replace_private_ones() -> None:
    pool, cache = make()
    tokens = list(range(16))
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens, len(tokens))
    second = BlockTable(pool, TableRows(), cache)
    second.grow(6)
    second.publish(tokens, 4, keys)
    first = BlockTable(pool, TableRows(), cache)
    fill(first, cache, tokens)
    hit = cache.match(keys, tokens, second.chain)
    assert [cached.blocks[0] for cached in hit] == first.block_ids[1:]
    second.adopt(hit)
    assert second.block_ids[1:] == first.block_ids[1:]
    assert pool.usage().used == 5, "the private block is free again; the first is each one's own"


def test_a_fork_shares_every_block_and_copies_the_one_it_writes_into() -> None:
    pool, cache = make()
    parent, fork = BlockTable(pool, TableRows(), cache), BlockTable(pool, TableRows(), cache)
    fill(parent, cache, list(range(10)))
    before = list(parent.block_ids)
    fork.fork(parent, 9)
    assert fork.block_ids == parent.block_ids
    assert [pool.ref_count(block) for block in before] == [2, 2, 2]
    assert fork.is_shared(9)
    assert not fork.is_shared(12), "that block is not there yet"
    [(source, target)] = fork.make_private(9)
    assert (source, fork.block_ids) == (before[2], [*before[:2], target])
    assert parent.block_ids == before
    assert not parent.is_shared(9), "the last owner writes in place"
    with pytest.raises(ValueError, match="empty table"):
        fork.fork(parent, 9)
    fork.release()
    parent.release()
    assert pool.usage().used == 0


def test_unpublish_forgets_own_blocks_but_not_adopted_ones() -> None:
    pool, cache = make()
    first = BlockTable(pool, TableRows(), cache)
    fill(first, cache, list(range(8)))
    keys: list[bytes] = []
    tokens = list(range(16))
    cache.extend_keys(keys, tokens, len(tokens))
    second = BlockTable(pool, TableRows(), cache)
    second.adopt(cache.match(keys, tokens))
    second.grow(16)
    second.publish(tokens, 16, keys)
    assert second.unpublish(2) == second.block_ids[2:]
    assert len(cache.match(keys, tokens)) == 2
    second.publish(tokens, 16, keys)
    assert len(cache.match(keys, tokens)) == 4, "it may compute and offer them again"


def test_unpublish_leaves_the_equal_blocks_of_another_alone() -> None:
    pool, cache = make()
    first, second = BlockTable(pool, TableRows(), cache), BlockTable(pool, TableRows(), cache)
    fill(first, cache, list(range(8)))
    fill(second, cache, list(range(8)))
    assert second.unpublish(0) == []
    assert len(cache) == 2


def test_a_private_copy_of_a_published_block_is_no_longer_part_of_the_chain() -> None:
    pool, cache = make()
    parent, fork = BlockTable(pool, TableRows(), cache), BlockTable(pool, TableRows(), cache)
    fill(parent, cache, list(range(12)))
    fork.fork(parent, 12)
    assert len(fork.chain) == 3
    fork.make_private(5)
    assert [cached.blocks[0] for cached in fork.chain] == parent.block_ids[:1]


def test_a_fork_knows_what_its_full_blocks_contain_and_no_more() -> None:
    pool, cache = make()
    parent, fork = BlockTable(pool, TableRows(), cache), BlockTable(pool, TableRows(), cache)
    fill(parent, cache, list(range(12)))
    fork.fork(parent, 9)
    assert [cached.blocks[0] for cached in fork.chain] == parent.block_ids[:2]
