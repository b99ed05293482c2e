"""How the "cpu" backend attends the query tokens of one step: made on the host, used by every layer of one window.

The pool is an array of matrices [slot, size], one for each (block, KV head); its first axis is `block * Hkv + head`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.cpu import streams

if TYPE_CHECKING:
    from mlxpaged.attention.metadata import AttentionMetadata, IntArray

BoolArray = npt.NDArray[np.bool_]

MAX_PADDING = 4
"""Most padded parts per real part. Beyond that, scatter-add merges the parts, which takes 8 times as long per part."""

MIN_SHARED = 32
"""Fewest (sequence, block) pairs that make a shared run worth its overhead."""

TILE = 64
"""Queries of a prompt in one tile: enough for fast products, and few masked keys."""

PAIR = 1e-6
"""Seconds for a (sequence, block) pair and one KV head, on one core."""

SCORE = 10e-9
"""Seconds for one query and one key, on one core."""


@dataclass(frozen=True)
class HeadSplit:
    """KV `heads` that one CPU stream attends. matrices[kv_head, block]: of these heads, in the pool."""

    heads: slice
    matrices: mx.array


@dataclass(frozen=True)
class SharedRun:
    """Consecutive blocks that several decoding sequences share and see completely. members: indices of the sequences
    among the decoding ones. splits: one per stream."""

    members: mx.array
    splits: list[HeadSplit]


@dataclass(frozen=True)
class Pairs:
    """P (sequence, block) pairs that one CPU stream attends.

    queries[P * Hkv]: index among [n, Hkv] query rows. matrices[P * Hkv]: index in the pool. order[P * Hkv]: 0, 1, 2...
    bias[P * Hkv, group, slot]: 0 for keys that are visible, else minus infinity.
    """

    queries: mx.array
    matrices: mx.array
    order: mx.array
    bias: mx.array


@dataclass(frozen=True)
class DecodePlan:
    """The n sequences with one query token each, at `rows` of the step.

    The parts of a sequence's attention are its pairs (one list entry per stream) and the shared runs it is a member of.
    parts[n, b, Hkv]: indices of each sequence's parts, padded; None if that is 0, 1, 2... padding[n, b, Hkv, group, 1]:
    minus infinity for padded entries, else 0; None if there are none. owner[parts * Hkv]: used instead of both if
    padding would exceed MAX_PADDING; the index among [n, Hkv] of every part.
    """

    rows: mx.array | slice
    pairs: list[Pairs]
    shared: list[SharedRun]
    parts: mx.array | None
    padding: mx.array | None
    owner: mx.array | None


@dataclass(frozen=True)
class Tile:
    """Queries `rows` of a chunk and all `keys` that any of them sees. bias[1, group * query, key]: as in `Pairs`."""

    rows: slice
    keys: slice
    bias: mx.array


@dataclass(frozen=True)
class ChunkPlan:
    """Prompt tokens of one sequence, at `rows` of the step. splits: one per stream."""

    rows: slice
    splits: list[HeadSplit]
    tiles: list[Tile]


@dataclass(frozen=True)
class Plan:
    """order: brings the outputs, decoding sequences first, back to the order of the query tokens; None if they are."""

    decode: DecodePlan | None
    chunks: list[ChunkPlan]
    order: mx.array | None


def make_plan(meta: AttentionMetadata, window: int | None, num_heads: int, num_kv_heads: int) -> Plan:
    group = num_heads // num_kv_heads
    lens = np.asarray(meta.host_query_lens)
    starts = np.cumsum(lens) - lens
    decoding = np.flatnonzero(lens == 1).astype(np.int32)
    prompts = np.flatnonzero(lens > 1).tolist()
    rows = np.concatenate([starts[decoding], *(np.arange(starts[i], starts[i] + lens[i]) for i in prompts)])
    return Plan(
        plan_decode(meta, decoding, starts[decoding], window, num_kv_heads, group) if len(decoding) else None,
        [plan_chunk(meta, i, int(starts[i]), window, num_kv_heads, group) for i in prompts],
        None if (np.diff(rows) > 0).all() else mx.array(np.argsort(rows).astype(np.int32)),
    )


def plan_chunk(
    meta: AttentionMetadata, sequence: int, row: int, window: int | None, num_kv_heads: int, group: int
) -> ChunkPlan:
    query_len, context_len = meta.host_query_lens[sequence], meta.host_context_lens[sequence]
    first_query = context_len - query_len
    first_block = (first_query - visible_before(first_query, window)) // meta.block_size
    num_keys = context_len - first_block * meta.block_size
    blocks = meta.host_block_tables[sequence, first_block : -(-context_len // meta.block_size)]
    splits = split_heads(blocks, query_len * group, num_keys, num_kv_heads)
    return ChunkPlan(slice(row, row + query_len), splits, make_tiles(query_len, num_keys, window, group))


def make_tiles(query_len: int, num_keys: int, window: int | None, group: int) -> list[Tile]:
    """All biases are views of one, except a shorter last tile's: every query sees the keys before it alike."""
    firsts = range(num_keys - query_len, num_keys, TILE)  # indices among the keys of the tiles' first queries
    most = visible_before(firsts[-1], window)
    query, key = np.arange(min(TILE, query_len))[:, None], np.arange(-most, min(TILE, query_len))
    visible = key <= query if window is None else (key <= query) & (key > query - window)
    whole = bias_of(np.tile(visible, (group, 1)))[None]
    tiles = []
    for first in firsts:
        before, size = visible_before(first, window), min(TILE, num_keys - first)
        bias = whole if size == len(query) else bias_of(np.tile(visible[:size], (group, 1)))[None]
        begin = first - firsts[0]
        keys = slice(first - before, first + size)
        tiles.append(Tile(slice(begin, begin + size), keys, bias[..., most - before : most + size]))
    return tiles


def visible_before(query: int, window: int | None) -> int:
    """How many keys before a query at this position the query sees."""
    return query if window is None else min(query, window - 1)


def split_heads(blocks: IntArray, num_queries: int, num_keys: int, num_kv_heads: int) -> list[HeadSplit]:
    """num_queries: of each KV head."""
    matrices = by_head(blocks, num_kv_heads).T
    slices = streams.split(num_kv_heads, num_kv_heads * num_queries * num_keys * SCORE)
    return [HeadSplit(heads, mx.array(matrices[heads])) for heads in slices]


def plan_decode(
    meta: AttentionMetadata, members: IntArray, rows: IntArray, window: int | None, num_kv_heads: int, group: int
) -> DecodePlan:
    size, n = meta.block_size, len(members)
    tables = meta.host_block_tables[members]
    context = np.asarray(meta.host_context_lens)[members]
    first = np.zeros_like(context) if window is None else np.maximum(context - window, 0)
    columns = np.arange(tables.shape[1])
    paired = (columns >= (first // size)[:, None]) & (columns < -(-context // size)[:, None])
    runs = shared_runs(tables, -(-first // size), (context - 1) // size)  # each sequence keeps at least its last block
    for sharing, begin, end in runs:
        paired[sharing, begin:end] = False
    owner, column = (indices.astype(np.int32) for indices in np.nonzero(paired))
    blocks = tables[owner, column]
    position = column[:, None] * size + np.arange(size)
    visible = (position < context[owner, None]) & (position >= first[owner, None])
    owners = np.concatenate([owner, *(sharing for sharing, _, _ in runs)])
    parts, is_padding = parts_by_owner(owners, n)
    skewed = parts.size > MAX_PADDING * len(owners)
    padded = bool(is_padding.any())
    in_order = not padded and bool((np.diff(parts.reshape(-1)) == 1).all())
    padding_shape = (*is_padding.shape, num_kv_heads, group, 1)
    return DecodePlan(
        rows=slice(0, n) if rows[-1] < n else mx.array(rows.astype(np.int32)),
        pairs=[
            make_pairs(by_head(owner[part], num_kv_heads), by_head(blocks[part], num_kv_heads), visible[part], group)
            for part in streams.split(len(owner), len(owner) * num_kv_heads * PAIR)
        ],
        shared=[
            SharedRun(
                mx.array(sharing.astype(np.int32)),
                split_heads(tables[sharing[0], begin:end], len(sharing) * group, (end - begin) * size, num_kv_heads),
            )
            for sharing, begin, end in runs
        ],
        parts=None if skewed or in_order else mx.array(by_head(parts, num_kv_heads)),
        padding=mx.broadcast_to(bias_of(~is_padding)[..., None, None, None], padding_shape)
        if padded and not skewed
        else None,
        owner=mx.array(by_head(owners, num_kv_heads).reshape(-1)) if skewed else None,
    )


def make_pairs(queries: IntArray, matrices: IntArray, visible: BoolArray, group: int) -> Pairs:
    """queries, matrices: [P, Hkv]; visible: [P, slot]."""
    num_pairs, num_kv_heads = queries.shape
    bias = mx.broadcast_to(bias_of(visible)[:, None, None], (num_pairs, num_kv_heads, group, visible.shape[1]))
    return Pairs(
        queries=mx.array(queries.reshape(-1).astype(np.uint32)),
        matrices=mx.array(matrices.reshape(-1).astype(np.uint32)),
        order=mx.arange(queries.size, dtype=mx.uint32),
        bias=bias.reshape(-1, group, visible.shape[1]),
    )


def by_head(indices: IntArray, num_kv_heads: int) -> IntArray:
    """[...] -> [..., num_kv_heads]: indices of the items' KV heads, which are adjacent."""
    return (indices[..., None] * num_kv_heads + np.arange(num_kv_heads)).astype(np.int32)


def bias_of(visible: BoolArray) -> mx.array:
    """0 where a key is visible, else minus infinity."""
    return mx.array(np.where(visible, np.float32(0), np.float32(-np.inf)))


def parts_by_owner(owner: IntArray, num_owners: int) -> tuple[IntArray, BoolArray]:
    """The parts of each owner, [num_owners, most], and which entries are padding; those repeat the owner's first part.
    Every owner has a part."""
    counts = np.bincount(owner, minlength=num_owners)
    padding = np.arange(counts.max()) >= counts[:, None]
    parts: IntArray = np.zeros(padding.shape, np.int32)
    parts[~padding] = np.argsort(owner, kind="stable")
    return np.where(padding, parts[:, :1], parts), padding


def shared_runs(tables: IntArray, first: IntArray, last: IntArray) -> list[tuple[IntArray, int, int]]:
    """Which sequences share which columns of their block tables, as (sequences, begin, end).

    Only columns from first[i] up to last[i], which sequence i sees completely, count. Runs follow the tree of common
    prefixes: two sequences of a larger group get a run of their own for what only they share. Small runs are left out.
    """
    runs = []
    branches = [(np.arange(len(tables)), 0)]
    while branches:
        branch, begin = branches.pop()
        branch = branch[last[branch] > begin]
        if len(branch) == 0 or len(branch) * int(last[branch].max() - begin) < MIN_SHARED:
            continue
        column = tables[branch, begin]
        blocks, counts = np.unique(column, return_counts=True)
        for block in blocks[counts > 1]:
            sharing = branch[column == block]
            columns = tables[sharing, begin : last[sharing].min()]
            same = (columns == columns[0]).all(axis=0)
            end = begin + (len(same) if same.all() else int(same.argmin()))
            begin_whole = max(begin, int(first[sharing].max()))
            if len(sharing) * (end - begin_whole) >= MIN_SHARED:
                runs.append((sharing, begin_whole, end))
            branches.append((sharing, end))
    return runs
