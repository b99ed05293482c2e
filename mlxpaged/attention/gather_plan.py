"""How the gather backend attends a step: which sequences read which blocks, in which products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention import lanes
from mlxpaged.attention.metadata import AttentionMetadata, IntArray, repeat_last

MOST_PADDING = 4
"""Times the parts of attention there are: where rows of as many as the longest sequence has would hold more, as one
long context beside many short ones makes them, parts are added up one by one, which takes eight times as long each."""

LEAST_SHARED = 32
"""Of a sequence and a block: shared blocks that stand for fewer pairs cost less as pairs."""

TILE = 64
"""Queries of a prompt that are attended together: enough for fast products, and few keys in vain."""

PAIR = 1e-6
"""Seconds that a pair takes for each KV head, on one core."""

SCORE = 10e-9
"""Seconds for a query and a key, on one core: their product, its power, and the product with the value."""


@dataclass(frozen=True)
class Heads:
    """KV `heads` that are attended on one lane, over one run of blocks. places[kv_head, block]: those of these heads of
    the blocks, in the pool."""

    heads: slice
    places: mx.array


@dataclass(frozen=True)
class SharedRun:
    """Blocks in a row of several decoding sequences' tables, visible whole to each. members: places among them. shares:
    one for each lane."""

    members: mx.array
    shares: list[Heads]


@dataclass(frozen=True)
class Pairs:
    """P pairs of a sequence and one of its blocks, which are attended on one lane.

    queries[P * Hkv], blocks[P * Hkv]: of every pair and KV head, the place among [n, Hkv] and among the pool's [block,
    Hkv]; order[P * Hkv]: 0, 1, 2 and so on. bias[P * Hkv, group, slot]: 0 for keys that are visible, minus infinity for
    those that are not, behind the end of a context or before a window.
    """

    queries: mx.array
    blocks: mx.array
    order: mx.array
    bias: mx.array


@dataclass(frozen=True)
class Decodes:
    """The n sequences with one query token each.

    rows[n]: the sequences' places among the step's query tokens. pairs: one for each lane, in the order of the
    sequences. Blocks in a shared run make no pairs. The parts of attention are the pairs, then every member of every
    run, each with all its KV heads. parts[n, b, Hkv]: those of each sequence; where padding[n, b, Hkv, group, 1] is
    minus infinity and not 0, one of its own that does not count. parts is None where that is their order, padding where
    there is none. Where most would be padding, owner[P' * Hkv] has the place among [n, Hkv] of every part and head, and
    parts and padding are None.
    """

    rows: mx.array | slice
    pairs: list[Pairs]
    shared: list[SharedRun]
    parts: mx.array | None
    padding: mx.array | None
    owner: mx.array | None


@dataclass(frozen=True)
class Tile:
    """Consecutive queries of a prompt, `rows` of its chunk, over `keys` of the chunk's: those that any of them sees.
    bias[1, group * query, key]: as in `Pairs`."""

    rows: slice
    keys: slice
    bias: mx.array


@dataclass(frozen=True)
class PromptChunk:
    """Query tokens `rows` of one sequence over the first num_keys keys of its `blocks`. group: query heads for each KV
    head."""

    rows: slice
    blocks: IntArray
    num_keys: int
    window: int | None
    group: int

    @property
    def num_queries(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @functools.cached_property
    def block_ids(self) -> mx.array:
        return mx.array(self.blocks)

    @functools.cached_property
    def tiles(self) -> list[Tile]:
        """Their biases are views of one, the last tile's of another where it is shorter: what a query sees of the keys
        before it is the same in every tile."""
        length = self.num_queries
        firsts = range(self.num_keys - length, self.num_keys, TILE)  # places of the tiles' first queries among the keys
        most = self._keys_before(firsts[-1])
        rows = min(TILE, length)
        query, key = np.arange(rows)[:, None], np.arange(-most, rows)
        one_head = bias_of(visible_keys(query, key, self.window))
        bias = self._for_group(one_head)
        tiles = []
        for first in firsts:
            before, size = self._keys_before(first), min(TILE, self.num_keys - first)
            begin = first - firsts[0]
            own = bias if size == rows else self._for_group(one_head[:size])
            part = own[..., most - before : most + size]
            tiles.append(Tile(slice(begin, begin + size), slice(first - before, first + size), part))
        return tiles

    def _for_group(self, bias: mx.array) -> mx.array:
        """[query, key] -> [1, group * query, key], a copy."""
        return mx.broadcast_to(bias, (self.group, *bias.shape)).reshape(1, -1, bias.shape[-1])

    @functools.cached_property
    def visible(self) -> mx.array:
        """[query, key], for an attention that takes the whole chunk at once."""
        key = np.arange(self.num_keys)
        return mx.array(visible_keys(key[-self.num_queries :, None], key, self.window))

    def _keys_before(self, first: int) -> int:
        """How many keys before the query at place `first` it sees."""
        return first if self.window is None else min(first, self.window - 1)


@dataclass(frozen=True)
class LanedChunk:
    """shares: one for each lane."""

    chunk: PromptChunk
    shares: list[Heads]


@dataclass(frozen=True)
class Plan:
    """How a step's query tokens are attended under one window; the same for every layer that has this window.

    order: brings the outputs, those of the decodes first, back into the order of the query tokens; None where they are.
    """

    decodes: Decodes | None
    chunks: list[LanedChunk]
    order: mx.array | None


def make_plan(meta: AttentionMetadata, window: int | None, num_heads: int, num_kv_heads: int) -> Plan:
    group = num_heads // num_kv_heads
    lens = np.asarray(meta.host_query_lens)
    starts = np.cumsum(lens) - lens
    decoding = np.flatnonzero(lens == 1).astype(np.int32)
    prompts = np.flatnonzero(lens > 1).tolist()
    chunks = [prompt_chunk(meta, i, int(starts[i]), window, group) for i in prompts]
    rows = np.concatenate([starts[decoding], *(np.arange(starts[i], starts[i] + lens[i]) for i in prompts)])
    in_order = bool((np.diff(rows) > 0).all()) and not meta.repeats
    return Plan(
        decodes(meta, decoding, starts, window, num_kv_heads, group) if len(decoding) else None,
        [
            LanedChunk(chunk, heads_of(chunk.blocks, chunk.num_queries * group, chunk.num_keys, num_kv_heads))
            for chunk in chunks
        ],
        None if in_order else mx.array(repeat_last(np.argsort(rows).astype(np.int32), meta.repeats)),
    )


def first_key(context_len: int, query_len: int, window: int | None) -> int:
    """Position of the first key that any of the query tokens sees."""
    return 0 if window is None else max(0, context_len - query_len + 1 - window)


def prompt_chunk(meta: AttentionMetadata, sequence: int, first_row: int, window: int | None, group: int) -> PromptChunk:
    query_len, context_len = meta.host_query_lens[sequence], meta.host_context_lens[sequence]
    first_block = first_key(context_len, query_len, window) // meta.block_size
    blocks = meta.host_block_tables[sequence, first_block : -(-context_len // meta.block_size)]
    num_keys = context_len - first_block * meta.block_size
    return PromptChunk(slice(first_row, first_row + query_len), blocks, num_keys, window, group)


def heads_of(blocks: IntArray, num_queries: int, num_keys: int, num_kv_heads: int) -> list[Heads]:
    """The KV heads of these blocks in shares, one for each lane; num_queries: of each head."""
    places = by_head(blocks, num_kv_heads).T
    shares = lanes.shares(num_kv_heads, num_kv_heads * num_queries * num_keys * SCORE)
    return [Heads(some, mx.array(places[some])) for some in shares]


def decodes(
    meta: AttentionMetadata,
    members: IntArray,
    starts: IntArray,
    window: int | None,
    num_kv_heads: int,
    group: int,
) -> Decodes:
    size = meta.block_size
    tables = meta.host_block_tables[members]
    context = np.asarray(meta.host_context_lens)[members]
    first = np.zeros_like(context) if window is None else np.maximum(context - window, 0)
    columns = np.arange(tables.shape[1])
    paired = (columns >= (first // size)[:, None]) & (columns < -(-context // size)[:, None])
    runs = shared_runs(tables, -(-first // size), (context - 1) // size)  # which leave every sequence its last block
    for sharing, begin, end in runs:
        paired[sharing, begin:end] = False
    owner, column = (at.astype(np.int32) for at in np.nonzero(paired))
    blocks = tables[owner, column]
    position = column[:, None] * size + np.arange(size)
    visible = (position < context[owner, None]) & (position >= first[owner, None])
    owners = np.concatenate([owner, *(sharing for sharing, _, _ in runs)])
    parts, padding = group_parts(owners, len(members))
    is_skewed = parts.size > MOST_PADDING * len(owners)
    in_order = not padding.any() and bool((np.diff(parts.reshape(-1)) == 1).all())
    rows = starts[members]
    return Decodes(
        rows=slice(0, len(members)) if rows[-1] < len(members) else mx.array(rows.astype(np.int32)),
        pairs=[
            pairs(by_head(owner[share], num_kv_heads), by_head(blocks[share], num_kv_heads), visible[share], group)
            for share in lanes.shares(len(owner), len(owner) * num_kv_heads * PAIR)
        ],
        shared=[
            SharedRun(
                mx.array(sharing.astype(np.int32)),
                heads_of(tables[sharing[0], begin:end], len(sharing) * group, (end - begin) * size, num_kv_heads),
            )
            for sharing, begin, end in runs
        ],
        parts=None if is_skewed or in_order else mx.array(by_head(parts, num_kv_heads)),
        padding=None
        if is_skewed or not padding.any()
        else mx.broadcast_to(bias_of(~padding)[:, :, None, None, None], (*padding.shape, num_kv_heads, group, 1)),
        owner=mx.array(by_head(owners, num_kv_heads).reshape(-1)) if is_skewed else None,
    )


def pairs(queries: IntArray, blocks: IntArray, visible: npt.NDArray[np.bool_], group: int) -> Pairs:
    """Of places [P, Hkv] of queries and blocks, and the keys that are visible, [P, slot]."""
    num_heads = queries.shape[1]
    bias = bias_of(visible)[:, None, None]
    return Pairs(
        queries=mx.array(queries.reshape(-1).astype(np.uint32)),
        blocks=mx.array(blocks.reshape(-1).astype(np.uint32)),
        order=mx.arange(queries.size, dtype=mx.uint32),
        bias=mx.broadcast_to(bias, (len(visible), num_heads, group, bias.shape[-1])).reshape(-1, group, bias.shape[-1]),
    )


def by_head(places: IntArray, num_kv_heads: int) -> IntArray:
    """[...] -> [..., num_kv_heads]: of each, the places of its KV heads, which lie side by side."""
    return (places[..., None] * num_kv_heads + np.arange(num_kv_heads)).astype(np.int32)


def visible_keys(
    query: npt.NDArray[np.integer[Any]], key: npt.NDArray[np.integer[Any]], window: int | None
) -> npt.NDArray[np.bool_]:
    """Of places among a sequence's keys, [query, 1] and [key], to [query, key]."""
    visible: npt.NDArray[np.bool_] = key <= query
    return visible if window is None else visible & (key > query - window)


def bias_of(visible: npt.NDArray[np.bool_]) -> mx.array:
    """To be added to scores: 0 where a key is visible, minus infinity where it is not."""
    return mx.array(np.where(visible, np.float32(0), np.float32(-np.inf)))


def group_parts(owner: IntArray, num_owners: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """From the owner of each part to the parts of each owner, [num_owners, most], and where there is none; the first of
    its own stands there. Every owner has a part."""
    counts = np.bincount(owner, minlength=num_owners)
    by_owner = np.argsort(owner, kind="stable")
    padding = np.arange(counts.max()) >= counts[:, None]
    parts: IntArray = np.zeros(padding.shape, np.int32)
    parts[~padding] = by_owner
    return np.where(padding, parts[:, :1], parts), padding


def shared_runs(tables: IntArray, first: IntArray, last: IntArray) -> list[tuple[IntArray, int, int]]:
    """Of the sequences with these block tables: which of them share which columns, as (sequences, begin, end).

    Only columns from first[i] up to last[i], which sequence i sees whole, count for it. Runs follow the tree of common
    prefixes: what two share beyond that of a larger group is a run of its own. Small ones are left out.
    """
    runs = []
    branches = [(np.arange(len(tables)), 0)]
    while branches:
        branch, begin = branches.pop()
        branch = branch[last[branch] > begin]
        if len(branch) == 0 or len(branch) * int(last[branch].max() - begin) < LEAST_SHARED:
            continue
        column = tables[branch, begin]
        for block in duplicates(column):
            sharing = branch[column == block]
            columns = tables[sharing, begin : last[sharing].min()]
            same = (columns == columns[0]).all(axis=0)
            end = begin + (len(same) if same.all() else int(same.argmin()))
            begin_whole = max(begin, int(first[sharing].max()))
            if len(sharing) * (end - begin_whole) >= LEAST_SHARED:
                runs.append((sharing, begin_whole, end))
            branches.append((sharing, end))
    return runs


def duplicates(blocks: IntArray) -> IntArray:
    ids, counts = np.unique(blocks, return_counts=True)
    return ids[counts > 1]
