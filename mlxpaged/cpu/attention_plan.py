"""Plans how the "cpu" backend attends the query tokens of a step, on the host, once for all layers with one window.

The pool is an array of matrices [slot, size], one for each (block, KV head); its first axis is `block * Hkv + head`.
"""

from __future__ import annotations

import math
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

TILE = 300e-6
"""Seconds for a tile of a prompt's queries beside those of its scores: some twenty operations, on one core."""

MAX_ROWS = 2048
"""Most rows (queries x heads of a KV head) of a tile, because scores are stored: latent layers have up to 128 heads."""

PAIR = 1e-6
"""Seconds for a (sequence, block) pair and one KV head, on one core."""

MERGE = 250e-6
"""Seconds to merge the pieces of sequences: some thirty small operations."""

SCORE = 10e-9
"""Seconds for one query and one key, on one core."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of sequences, with as many blocks each, that one CPU stream attends. A row is a piece of one KV head.

    queries[row, block]: index among [n * Hkv] query rows. matrices[row, block]: index in the pool. order[row, block]:
    0, 1, 2... bias[row, block, group, slot]: 0 for keys that are visible, else minus infinity. A shorter piece repeats
    its first block, invisible.
    """

    queries: mx.array
    matrices: mx.array
    order: mx.array
    bias: mx.array


@dataclass(frozen=True)
class SharedRun:
    """Blocks that m decoding sequences share and see completely. queries[Hkv, m] and matrices[Hkv, block] are indices
    as in `Pieces`."""

    queries: mx.array
    matrices: mx.array


@dataclass(frozen=True)
class DecodePlan:
    """The n sequences with one query token each, at `rows` of the step.

    work: lists with a part for each CPU stream. merged[n * Hkv, b]: which rows of all parts belong to a query row; None
    if that is 0, 1, 2... padding[n * Hkv, b, 1, 1]: minus infinity for padding entries of `merged`, else 0.
    """

    rows: mx.array | slice
    work: list[Sequence[Pieces | SharedRun]]
    merged: mx.array | None
    padding: mx.array


@dataclass(frozen=True)
class Tile:
    """Queries `rows` of a chunk and all `keys` that any of them sees. bias[1, group * query, key]: as in `Pieces`."""

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
    heads = streams.split(num_kv_heads, query_len * group * num_kv_heads * num_keys * SCORE)
    length = tile_length(query_len, num_kv_heads, group)
    if locality.looks_ahead(meta.step, [sequence]):
        lasts = locality.last_keys(meta.step, sequence)
        offset = first_block * meta.block_size
        tiles = tiles_by_ranges(firsts - offset, lasts - offset, group, length)
    else:
        tiles = causal_tiles(meta, sequence, firsts, locality, group, length)
    matrices = by_head(blocks, num_kv_heads).T
    parts = [HeadsPart(part, mx.array(matrices[part])) for part in heads]
    return ChunkPlan(slice(row, row + query_len), parts, tiles)


def tile_length(query_len: int, num_kv_heads: int, group: int) -> int:
    """Queries in a tile of a prompt's chunk, for the least time of one stream. The longer a tile is, the more of its
    scores are masked: half its length for each query."""
    best = math.sqrt(2 * TILE / (num_kv_heads * group * SCORE))
    number = max(1, round(query_len / best), -(-query_len * group // MAX_ROWS))
    return -(-query_len // number)


def causal_tiles(
    meta: AttentionMetadata, sequence: int, firsts: IntArray, locality: Locality, group: int, length: int
) -> list[Tile]:
    """The tiles of a sequence's chunk, each query of which sees the keys from one of `firsts` on up to its own."""
    first_key = int(firsts[0]) // meta.block_size * meta.block_size
    num_keys = meta.step.context_lens[sequence] - first_key
    tiles = []
    for begin, end in pieces(firsts, locality):
        offset = int(firsts[begin]) - first_key if locality.window is None else 0
        last = num_keys - len(firsts) + end
        for tile in make_tiles(end - begin, last - offset, locality.window, group, length):
            rows = slice(tile.rows.start + begin, tile.rows.stop + begin)
            tiles.append(Tile(rows, slice(tile.keys.start + offset, tile.keys.stop + offset), tile.bias))
    return tiles


def tiles_by_ranges(firsts: IntArray, lasts: IntArray, group: int, length: int) -> list[Tile]:
    """The tiles of a chunk whose query i sees the keys from firsts[i] to lasts[i]."""
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


def make_tiles(query_len: int, num_keys: int, window: int | None, group: int, length: int) -> list[Tile]:
    """The tiles of a chunk. Their biases are views of one array, except a shorter last tile's: every query sees the
    keys before it alike."""
    length = min(length, query_len)
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
    begins, ends = first // size, -(-context // size)
    # Each sequence keeps its last block for itself. Local queries see different parts of a common prefix.
    is_local = locality.window is not None or locality.chunk is not None
    runs = [] if is_local else shared_runs(tables, (context - 1) // size)
    for sharing, end in runs:
        begins[sharing] = end
    counts = ends - begins
    length = piece_length(counts, num_kv_heads)
    owner = np.repeat(np.arange(n), -(-counts // length))
    start = begins[owner] + (np.arange(len(owner)) - np.searchsorted(owner, owner)) * length
    columns = start[:, None] + np.arange(length)
    is_own = columns < ends[owner, None]
    columns = np.where(is_own, columns, start[:, None])
    position = columns[..., None] * size + np.arange(size)
    visible = is_own[..., None] & (position < context[owner, None, None]) & (position >= first[owner, None, None])
    queries: IntArray = by_head(owner, num_kv_heads).reshape(-1)
    matrices: IntArray = by_head(tables[owner[:, None], columns], num_kv_heads).swapaxes(1, 2).reshape(-1, length)
    order = np.argsort(queries, kind="stable")
    queries, matrices, visible = queries[order], matrices[order], visible[order // num_kv_heads]
    bias = np.repeat(visible[:, :, None], group, axis=2)
    pieces = [
        Pieces(
            mx.array(np.repeat(queries[part, None], length, axis=1).astype(np.uint32)),
            mx.array(matrices[part].astype(np.uint32)),
            mx.arange((part.stop - part.start) * length, dtype=mx.uint32).reshape(-1, length),
            bias_of(bias[part]),
        )
        for part in streams.split(len(queries), matrices.size * PAIR)
    ]
    work: list[Sequence[Pieces | SharedRun]] = [pieces]
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


def piece_length(counts: IntArray, num_kv_heads: int) -> int:
    """Blocks of a piece, for sequences with so many blocks each, for the least time. Where sequences are shorter, long
    pieces have blocks that count for nothing, and leave CPU streams without work. Short ones must be merged."""
    number, longest = streams.count(int(counts.sum()) * num_kv_heads * PAIR), int(counts.max())

    def seconds(length: int) -> float:
        rows = int((-(-counts // length)).sum()) * num_kv_heads
        return -(-rows // number) * length * PAIR + (MERGE if length < longest else 0.0)

    lengths = longest, -(-longest // number), *(1 << i for i in reversed(range(longest.bit_length())))
    return min(lengths, key=seconds)


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
