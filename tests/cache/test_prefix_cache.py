"""Hits need equal tokens at equal positions, even if the hashes are equal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpaged.core.blocks import prefix_cache
from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.blocks.table_rows import TableRows
from mlxpaged.core.step import FIRST_CONTENT_ID

Tokens = list[int]


def make(seed: bytes = b"", num_blocks: int = 64, block_size: int = 4) -> tuple[BlockPool[Any], PrefixCache]:
    pool: BlockPool[Any] = BlockPool(num_blocks, block_size)
    return pool, PrefixCache(pool, seed)


def keys_of(cache: PrefixCache, tokens: Tokens) -> list[bytes]:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens, len(tokens))
    return keys


def store(pool: BlockPool[Any], cache: PrefixCache, tokens: Tokens) -> BlockTable:
    table = BlockTable(pool, TableRows(), cache)
    table.grow(len(tokens))
    table.publish(tokens, len(tokens), keys_of(cache, tokens))
    return table


def hit_tokens(cache: PrefixCache, tokens: Tokens) -> int:
    return 4 * len(cache.match(keys_of(cache, tokens), tokens))


def test_the_longest_known_prefix_is_found_after_its_sequence_is_gone() -> None:
    pool, cache = make()
    store(pool, cache, list(range(12))).release()
    assert hit_tokens(cache, [*range(12), 99]) == 12
    assert hit_tokens(cache, [*range(8), 99, 98, 97, 96]) == 8
    assert hit_tokens(cache, [99, *range(11)]) == 0


def test_equal_blocks_at_different_places_are_different_prefixes() -> None:
    pool, cache = make()
    store(pool, cache, [1, 2, 3, 4, 1, 2, 3, 4])
    assert hit_tokens(cache, [1, 2, 3, 4]) == 4
    assert hit_tokens(cache, [5, 6, 7, 8, 1, 2, 3, 4]) == 0


def test_keys_have_128_bits_and_depend_on_the_seed() -> None:
    _, one = make(b"model one")
    _, two = make(b"model two")
    tokens = list(range(8))
    assert all(len(key) == 16 for key in keys_of(one, tokens))
    assert set(keys_of(one, tokens)).isdisjoint(keys_of(two, tokens))


def test_keys_are_extended_without_hashing_again() -> None:
    _, cache = make()
    keys = keys_of(cache, list(range(8)))
    longer = list(keys)
    cache.extend_keys(longer, list(range(12)), 12)
    assert longer[:2] == keys
    assert longer == keys_of(cache, list(range(12)))


@pytest.fixture
def colliding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of every prompt gets the same key."""
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent_key, tokens: b"same")


@pytest.mark.usefixtures("colliding")
def test_a_forced_collision_never_shares() -> None:
    pool, cache = make()
    store(pool, cache, [1, 2, 3, 4])
    assert hit_tokens(cache, [1, 2, 3, 4]) == 4
    assert hit_tokens(cache, [5, 6, 7, 8]) == 0
    store(pool, cache, [5, 6, 7, 8, 1, 2, 3, 4])
    assert hit_tokens(cache, [5, 6, 7, 8, 1, 2, 3, 4]) == 0
    assert hit_tokens(cache, [1, 2, 3, 4, 1, 2, 3, 4]) == 4


@pytest.mark.usefixtures("colliding")
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=12), min_size=1, max_size=8))
def test_with_every_hash_colliding_a_hit_still_holds_the_very_tokens(prompts: list[Tokens]) -> None:
    pool, cache = make()
    contents: dict[int, Tokens] = {}
    for tokens in prompts:
        for index, cached in enumerate(cache.match(keys_of(cache, tokens), tokens)):
            assert contents[cached.blocks[0]] == tokens[: 4 * (index + 1)]
        table = store(pool, cache, tokens)
        for index, block in enumerate(table.block_ids):
            contents[block] = tokens[: 4 * (index + 1)]


def test_a_block_whose_head_was_evicted_is_not_found_and_makes_room_for_its_successor() -> None:
    pool, cache = make()
    first = store(pool, cache, list(range(8)))
    pool.forget(first.block_ids[0])
    assert hit_tokens(cache, list(range(8))) == 0
    second = store(pool, cache, list(range(8)))
    hit = cache.match(keys_of(cache, list(range(8))), list(range(8)))
    assert [cached.blocks[0] for cached in hit] == second.block_ids


def test_an_evicted_block_is_never_found_again() -> None:
    pool, cache = make(num_blocks=2)
    store(pool, cache, list(range(8))).release()
    pool.allocate(2)
    assert hit_tokens(cache, list(range(8))) == 0
    assert len(cache) == 0


def test_the_second_of_two_equal_blocks_stays_private() -> None:
    pool, cache = make()
    first, second = store(pool, cache, [1, 2, 3, 4]), store(pool, cache, [1, 2, 3, 4])
    assert len(cache) == 1
    second.release()
    assert pool.usage().cached == 0
    assert [c.blocks[0] for c in cache.match(keys_of(cache, [1, 2, 3, 4]), [1, 2, 3, 4])] == first.block_ids


def test_clear_forgets_everything_and_leaves_running_sequences_their_blocks() -> None:
    pool, cache = make()
    running, ended = store(pool, cache, list(range(8))), store(pool, cache, list(range(20, 28)))
    ended.release()
    cache.clear()
    assert len(cache) == 0
    assert hit_tokens(cache, list(range(8))) == 0
    assert pool.usage().used == len(running)
    assert pool.usage().cached == 0


def test_blocks_after_an_evicted_one_are_not_published_because_no_prompt_could_find_them() -> None:
    pool, cache = make()
    tokens = list(range(8))
    table = store(pool, cache, tokens[:4])
    pool.forget(table.block_ids[0])
    table.grow(8)
    table.publish(tokens, 8, keys_of(cache, tokens))
    assert len(cache) == 0
    table.release()
    assert pool.usage().cached == 0


def test_what_ids_of_content_stand_for_is_a_part_of_the_keys() -> None:
    """Two processes may give one id to two images."""
    tokens = [1, 2, 3, 4, 5, FIRST_CONTENT_ID, FIRST_CONTENT_ID + 1, 8, 9, 10, 11, 12]
    keys: dict[bytes, list[bytes]] = {}
    for content in (b"cat", b"dog"):
        _, cache = make()
        cache.content_of = {FIRST_CONTENT_ID: content, FIRST_CONTENT_ID + 1: content}.__getitem__
        keys[content] = []
        cache.extend_keys(keys[content], tokens, len(tokens))
    assert [cat == dog for cat, dog in zip(keys[b"cat"], keys[b"dog"], strict=True)] == [True, False, False]


def test_blocks_that_leave_the_pool_are_told_before_they_are_forgotten() -> None:
    pool, cache = make(num_blocks=3)
    left: list[tuple[int, ...]] = []
    pool.call_at_leave(lambda block, content: left.append((block, *content.record.tokens)))
    table = store(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    blocks = table.block_ids
    table.release()
    pool.allocate(2)
    assert left == [(blocks[1], 5, 6, 7, 8)], "the tail of a prefix goes first"
    cache.clear()
    assert len(left) == 1, "what is emptied does not leave"


def test_contents_of_a_block_that_differs_are_not_shared() -> None:
    """An id may stand for something else: only the key of the whole block tells."""
    pool, cache = make()
    cache.content_of = {FIRST_CONTENT_ID: b"a picture"}.__getitem__
    tokens = [1, 2, FIRST_CONTENT_ID, 4]
    store(pool, cache, tokens).release()

    def common(wanted: Tokens) -> int:
        found = cache.match_within([], wanted, [])
        return 0 if found is None else found[1]

    assert common(tokens) == 4
    assert common([1, 2, FIRST_CONTENT_ID, 5]) == 2
    assert common([FIRST_CONTENT_ID, 2, 3, 4]) == 0
    cache.content_of = {FIRST_CONTENT_ID: b"another picture"}.__getitem__
    assert common(tokens) == 2


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=12), st.lists(st.integers(0, 2)))
def test_the_block_with_most_common_tokens_is_found(blocks: list[Tokens], wanted: Tokens) -> None:
    pool, cache = make()
    for block in blocks:
        store(pool, cache, block).release()
    pool.evict(len(blocks) // 2)
    left = [record.tokens for record in cache]
    most = max((next((i for i in range(4) if [*each][: i + 1] != wanted[: i + 1]), 4) for each in left), default=0)
    found = cache.match_within([], wanted, [])
    assert (0 if found is None else found[1]) == most
    assert found is None or [*found[0].tokens[:most]] == wanted[:most]
