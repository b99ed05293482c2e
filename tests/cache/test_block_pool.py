"""The free list, the reference counts, and what happens to content."""

from __future__ import annotations

import random

import pytest

from mlxpaged.core.blocks.block_pool import BlockPool, BlockPoolError, BlockUsage, DoubleFreeError, OutOfBlocksError
from mlxpaged.engine_config import EngineConfig


def test_default_block_size_is_32() -> None:
    assert BlockPool(1).block_size == 32


@pytest.mark.parametrize("size", [8, 16, 32])
def test_supported_block_sizes_are_accepted(size: int) -> None:
    assert EngineConfig(block_size=size).block_size == size


def test_block_size_24_is_rejected_by_pool_and_config() -> None:
    with pytest.raises(ValueError, match="24"):
        BlockPool(4, 24)
    with pytest.raises(ValueError, match="24"):
        EngineConfig(block_size=24)


def test_a_pool_has_blocks_or_none() -> None:
    assert BlockPool(0, block_size=16).num_free == 0
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(-1)


def test_ten_thousand_random_operations_keep_the_books_balanced() -> None:
    rng = random.Random(0)
    pool: BlockPool[str] = BlockPool(64, 4)
    held: list[int] = []
    for _ in range(10_000):
        match rng.randrange(5):
            case 0 | 1:
                count = rng.randrange(5)
                if count <= pool.num_free:
                    held += pool.allocate(count)
                else:
                    with pytest.raises(OutOfBlocksError):
                        pool.allocate(count)
            case 2 if held:
                block = rng.choice(held)
                pool.share(block)
                held.append(block)
            case 3 if held:
                pool.release([held.pop(rng.randrange(len(held)))])
            case 4 if held:
                pool.remember(rng.choice(held), "content")
        usage = pool.usage()
        assert usage.used + usage.cached + usage.free == 64
        assert usage.used == len(set(held))
        assert all(pool.ref_count(block) == held.count(block) for block in range(64))
        assert usage.cached == sum(pool.content(b) is not None and pool.ref_count(b) == 0 for b in range(64))


def test_states_tell_free_cached_used_and_shared_blocks_apart() -> None:
    pool: BlockPool[str] = BlockPool(6, 4)
    used, shared, cached, crowded, passed = pool.allocate(5)
    for block in (cached, passed):
        pool.remember(block, f"{block}")
    pool.release([cached])
    pool.release([passed], passed=True)
    pool.share(shared)
    assert pool.states() == bytes([2, 3, 1, 2, 1, 0])
    for _ in range(253):
        pool.share(crowded)
    assert pool.states()[crowded] == 255
    for _ in range(2):
        pool.share(crowded)
    assert pool.ref_count(crowded) == 256
    assert pool.states() == bytes([2, 3, 1, 255, 1, 0])
    assert pool.states()[used] == 2


def test_freeing_twice_raises() -> None:
    pool: BlockPool[str] = BlockPool(2)
    [block] = pool.allocate(1)
    pool.release([block])
    with pytest.raises(DoubleFreeError, match=str(block)):
        pool.release([block])
    assert pool.num_free == 2


def test_asking_for_too_many_takes_nothing() -> None:
    pool: BlockPool[str] = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 of 3 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool: BlockPool[str] = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.remember(first, "kept")
    pool.release([first, second, third])
    assert pool.usage() == BlockUsage(used=0, cached=1, free=2)
    assert set(pool.allocate(2)) == {second, third}
    assert pool.content(first) == "kept"


def test_cached_blocks_are_evicted_longest_unused_first_and_the_index_is_told() -> None:
    evicted: list[tuple[int, str]] = []
    pool: BlockPool[str] = BlockPool(3)
    pool.call_at_evict(lambda block, content: evicted.append((block, content)))
    blocks = pool.allocate(3)
    for block, content in zip(blocks, "abc", strict=True):
        pool.remember(block, content)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    assert pool.allocate(2) == [blocks[1], blocks[0]]
    assert evicted == [(blocks[1], "b"), (blocks[0], "a")]


def test_a_hit_takes_a_cached_block_out_of_the_middle_of_the_free_list() -> None:
    pool: BlockPool[str] = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.remember(block, "x")
    pool.release(blocks)
    pool.share(blocks[1])
    assert pool.usage() == BlockUsage(used=1, cached=2, free=0)
    assert pool.allocate(2) == [blocks[0], blocks[2]]


def test_content_is_only_given_to_blocks_in_use() -> None:
    with pytest.raises(BlockPoolError, match="free"):
        BlockPool(1).remember(0, "content")


def test_the_block_that_was_freed_last_is_handed_out_next() -> None:
    """Its memory is committed already: a pool that is never full stays small."""
    pool: BlockPool[str] = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release([blocks[1]])
    assert pool.allocate(2) == [blocks[1], 3]
