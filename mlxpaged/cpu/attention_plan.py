"""Plans how the "cpu" backend attends the query tokens of a step, on the host, once for all layers with one window.

The pool is an array of matrices [slot, size], one for each (block, KV head); its first axis is `block * Hkv + head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.cpu import streams

if TYPE_CHECKING:
    from mlxpaged.attention.metadata import AttentionMetadata, IntArray
    from mlxpaged.attention.pool import Locality

BoolArray = npt.NDArray[np.bool_]

MIN_SHARED = 32
"""Fewest (sequence, block) pairs for which sharing blocks is worth its overhead."""

TILE = 64
"""Queries of a prompt in one tile. Larger tiles have faster products, smaller ones have fewer masked keys."""

MAX_ROWS = 2048
"""Most rows (queries x heads of a KV head) of a tile, because scores are stored: latent layers have up to 128 heads."""

PAIR = 1e-6
"""Seconds for a (sequence, block) pair and one KV head, on one core."""

SCORE = 10e-9
"""Seconds for one query and one key, on one core."""


@dataclass(frozen=True)
class Pairs:
    """P (sequence, block) pairs that one CPU stream attends.

    queries[P * Hkv]: index among [n * Hkv] query rows. matrices[P * Hkv]: index in the pool. order[P * Hkv]: 0, 1, 2...
    bias[P * Hkv, group, slot]: 0 for keys that are visible, else minus infinity.
    """

    queries: mx.array
    matrices: mx.array
    order: mx.array
    bias: mx.array


@dataclass(frozen=True)
class SharedRun:
    """Blocks that m decoding sequences share and see completely. queries[Hkv, m] and matrices[Hkv, block] are indices
    as in `Pairs`."""

    queries: mx.array
    matrices: mx.array


@dataclass(frozen=True)
class DecodePlan:
    """The n sequences with one query token each, at `rows` of the step.

    work: lists with a part for each CPU stream. merged[n * Hkv, b]: which rows of all parts belong to a query row; None
    if that is 0, 1, 2... padding[n * Hkv, b, 1, 1]: minus infinity for padding entries of `merged`, else 0.
    """

    rows: mx.array | slice
    work: list[Sequence[Pairs | SharedRun]]
    merged: mx.array | None
    padding: mx.array


@dataclass(frozen=True)
class Tile:
    """Queries `rows` of a chunk and all `keys` that any of them sees. bias[1, group * query, key]: as in `Pairs`."""

    rows: slice
    keys: slice
    bias: mx.array


@dataclass(frozen=True)
class HeadsPart:
    """The KV heads that one CPU stream attends. matrices[head, block]: of the sequence's keys."""

    heads: slice
    matrices: mx.array


@dataclass(frozen=True)
class ChunkPlan:
    """Prompt tokens of one sequence, at `rows` of the step."""

    rows: slice
    parts: list[HeadsPart]
    tiles: list[Tile]


@dataclass(frozen=True)
class Plan:
    """order: puts the outputs, decoding sequences first, in the order of the query tokens; None if they are in it."""

    decode: DecodePlan | None
    chunks: list[ChunkPlan]
    order: mx.array | None


def make_plan(meta: AttentionMetadata, locality: Locality, num_heads: int, num_kv_heads: int) -> Plan:
    group = num_heads // num_kv_heads
    lens = np.asarray(meta.step.query_lens)
    starts = np.cumsum(lens) - lens
    decoding = np.flatnonzero(lens == 1).astype(np.int32)
    prompts = np.flatnonzero(lens > 1).tolist()
    rows = np.concatenate([starts[decoding], *(np.arange(starts[i], starts[i] + lens[i]) for i in prompts)])
    return Plan(
        plan_decode(meta, decoding, starts[decoding], locality, num_kv_heads, group) if len(decoding) else None,
        [plan_chunk(meta, i, int(starts[i]), locality, num_kv_heads, group) for i in prompts],
        None if (np.diff(rows) > 0).all() else mx.array(np.argsort(rows).astype(np.int32)),
    )


def plan_chunk(
    meta: AttentionMetadata, sequence: int, row: int, locality: Locality, num_kv_heads: int, group: int
) -> ChunkPlan:
    query_len, context_len = meta.step.query_lens[sequence], meta.step.context_lens[sequence]
    first_query = context_len - query_len
    firsts = locality.first_key(np.arange(first_query, context_len))
    first_block = int(firsts[0]) // meta.block_size
    num_keys = context_len - first_block * meta.block_size
    blocks = meta.host_block_tables[sequence, first_block : -(-context_len // meta.block_size)]
    if locality.looks_ahead(meta.step, [sequence]):
        lasts = locality.last_keys(meta.step, sequence)
        tiles = tiles_by_ranges(firsts - first_block * meta.block_size, lasts - first_block * meta.block_size, group)
    else:
        tiles = causal_tiles(meta, sequence, firsts, locality, group)
    matrices = by_head(blocks, num_kv_heads).T
    heads = streams.split(num_kv_heads, query_len * group * num_kv_heads * num_keys * SCORE)
    parts = [HeadsPart(part, mx.array(matrices[part])) for part in heads]
    return ChunkPlan(slice(row, row + query_len), parts, tiles)


def causal_tiles(
    meta: AttentionMetadata, sequence: int, firsts: IntArray, locality: Locality, group: int
) -> list[Tile]:
    """The tiles of a sequence's chunk, each query of which sees the keys from one of `firsts` on up to its own."""
    first_key = int(firsts[0]) // meta.block_size * meta.block_size
    num_keys = meta.step.context_lens[sequence] - first_key
    tiles = []
    for begin, end in pieces(firsts, locality):
        offset = int(firsts[begin]) - first_key if locality.window is None else 0
        last = num_keys - len(firsts) + end
        for tile in make_tiles(end - begin, last - offset, locality.window, group):
            rows = slice(tile.rows.start + begin, tile.rows.stop + begin)
            tiles.append(Tile(rows, slice(tile.keys.start + offset, tile.keys.stop + offset), tile.bias))
    return tiles


def tiles_by_ranges(firsts: IntArray, lasts: IntArray, group: int) -> list[Tile]:
    """The tiles of a chunk whose query i sees the keys from firsts[i] to lasts[i]."""
    length = min(TILE, max(1, MAX_ROWS // group))
    tiles = []
    for begin in range(0, len(firsts), length):
        rows = slice(begin, min(begin + length, len(firsts)))
        first, last = firsts[rows, None], lasts[rows, None]
        keys = np.arange(first.min(), last.max() + 1)
        bias = bias_of(np.tile((keys >= first) & (keys <= last), (group, 1)))[None]
        tiles.append(Tile(rows, slice(int(keys[0]), int(keys[-1]) + 1), bias))
    return tiles


def pieces(firsts: IntArray, locality: Locality) -> list[tuple[int, int]]:
    """Ranges of queries with one mask: the queries of a chunk of the locality, else all."""
    if locality.chunk is None:
        return [(0, len(firsts))]
    starts = np.flatnonzero(np.diff(firsts, prepend=-1)).tolist()
    return list(zip(starts, [*starts[1:], len(firsts)], strict=True))


def make_tiles(query_len: int, num_keys: int, window: int | None, group: int) -> list[Tile]:
    """The tiles of a chunk. Their biases are views of one array, except a shorter last tile's: every query sees the
    keys before it alike."""
    length = min(TILE, max(1, MAX_ROWS // group), query_len)
    firsts = range(num_keys - query_len, num_keys, length)  # indices among the keys of the tiles' first queries
    most = visible_before(firsts[-1], window)
    query, key = np.arange(length)[:, None], np.arange(-most, length)
    visible = key <= query if window is None else (key <= query) & (key > query - window)
    whole = bias_of(np.tile(visible, (group, 1)))[None]
    tiles = []
    for first in firsts:
        before, size = visible_before(first, window), min(length, num_keys - first)
        bias = whole if size == length else bias_of(np.tile(visible[:size], (group, 1)))[None]
        begin = first - firsts[0]
        keys = slice(first - before, first + size)
        tiles.append(Tile(slice(begin, begin + size), keys, bias[..., most - before : most + size]))
    return tiles


def visible_before(query: int, window: int | None) -> int:
    """How many keys before a query at this position the query sees."""
    return query if window is None else min(query, window - 1)


def plan_decode(
    meta: AttentionMetadata, members: IntArray, rows: IntArray, locality: Locality, num_kv_heads: int, group: int
) -> DecodePlan:
    size, n = meta.block_size, len(members)
    tables = meta.host_block_tables[members]
    context = np.asarray(meta.step.context_lens)[members]
    first = locality.first_key(context - 1)
    columns = np.arange(tables.shape[1])
    paired = (columns >= (first // size)[:, None]) & (columns < -(-context // size)[:, None])
    # Each sequence keeps its last block as a pair. Local queries see different parts of a common prefix.
    is_local = locality.window is not None or locality.chunk is not None
    runs = [] if is_local else shared_runs(tables, (context - 1) // size)
    for sharing, end in runs:
        paired[sharing, :end] = False
    owner, column = (indices.astype(np.int32) for indices in np.nonzero(paired))
    position = column[:, None] * size + np.arange(size)
    visible = (position < context[owner, None]) & (position >= first[owner, None])
    queries: IntArray
    matrices: IntArray
    queries, matrices = (by_head(each, num_kv_heads).reshape(-1) for each in (owner, tables[owner, column]))
    order = np.argsort(queries, kind="stable")
    queries, matrices = queries[order], matrices[order]
    bias = np.repeat(visible[order // num_kv_heads, None], group, axis=1)
    pairs = [
        Pairs(
            mx.array(queries[part].astype(np.uint32)),
            mx.array(matrices[part].astype(np.uint32)),
            mx.arange(part.stop - part.start, dtype=mx.uint32),
            bias_of(bias[part]),
        )
        for part in streams.split(len(queries), len(queries) * PAIR)
    ]
    work: list[Sequence[Pairs | SharedRun]] = [pairs]
    owners = [queries]
    for sharing, end in runs:
        queries, matrices = by_head(sharing, num_kv_heads).T, by_head(tables[sharing[0], :end], num_kv_heads).T
        parts = streams.split(end, queries.size * group * end * size * SCORE)
        work.append([SharedRun(mx.array(queries), mx.array(matrices[:, part])) for part in parts])
        owners += [queries.reshape(-1)] * len(parts)
    merged, is_padding = parts_by_owner(np.concatenate(owners), n * num_kv_heads)
    return DecodePlan(
        slice(0, n) if rows[-1] < n else mx.array(rows.astype(np.int32)),
        work,
        None if (np.diff(merged.reshape(-1)) == 1).all() else mx.array(merged),
        bias_of(~is_padding)[..., None, None],
    )


def by_head(indices: IntArray, num_kv_heads: int) -> IntArray:
    """[...] -> [..., num_kv_heads]: indices of the items' KV heads, which are adjacent."""
    return (indices[..., None] * num_kv_heads + np.arange(num_kv_heads)).astype(np.int32)


def bias_of(visible: BoolArray) -> mx.array:
    """0 for a visible key, else minus infinity."""
    return mx.array(np.where(visible, np.float32(0), np.float32(-np.inf)))


def parts_by_owner(owner: IntArray, num_owners: int) -> tuple[IntArray, BoolArray]:
    """The parts of each owner, [num_owners, most], and which entries are padding; those repeat the owner's first part.
    Every owner has a part."""
    counts = np.bincount(owner, minlength=num_owners)
    padding = np.arange(counts.max()) >= counts[:, None]
    parts: IntArray = np.zeros(padding.shape, np.int32)
    parts[~padding] = np.argsort(owner, kind="stable")
    return np.where(padding, parts[:, :1], parts), padding


def shared_runs(tables: IntArray, last: IntArray) -> list[tuple[IntArray, int]]:
    """Sequences that share their first block, and the number of leading blocks, before the last one of any of them,
    that they have in common. Runs with fewer than MIN_SHARED pairs are left out."""
    runs = []
    blocks, counts = np.unique(tables[:, 0], return_counts=True)
    for block in blocks[counts > 1]:
        sharing = np.flatnonzero(tables[:, 0] == block).astype(np.int32)
        prefixes = tables[sharing, : last[sharing].min()]
        end = int(np.logical_and.accumulate((prefixes == prefixes[0]).all(axis=0)).sum())
        if len(sharing) * end >= MIN_SHARED:
            runs.append((sharing, end))
    return runs
