"""The gather backend: copies each sequence's keys and values out of the pool, for MLX's own attention on any device.

It is short and slow. The self-check compares the Metal kernels with it, and a Mac uses it if its kernels fail that
check. Only slots of a context are ever read, so the contents of other slots cannot reach an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxpaged.attention.key_ranges import attend_in_ranges, make_ranges, rows_of
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Locality, Memory, Options

MAX_SCORES = 2**28
"""Most scores that one call keeps: 0.5 GB in 16-bit types. MLX keeps all where no fused kernel computes them."""

FUSED_SIZES = frozenset({64, 72, 80, 96, 128})
FORCED_SIZES = frozenset({192, 256})
"""Sizes of heads for which MLX has a fused kernel for prompts on a GPU. For the second it takes it only if told to,
because keeping the scores is faster (ml-explore/mlx: has_fused_kernel and use_fallback in
backend/metal/scaled_dot_product_attention.cpp)."""

SCORE_ARRAYS = 2
"""Arrays of scores that MLX keeps at once: before and after the softmax."""

SOFTCAP_ARRAYS = 4
"""Arrays of float32 scores that `attention` keeps at once for a softcap."""


@dataclass(frozen=True)
class Group:
    """n sequences with L query tokens each. K: the most keys that one of them sees; the others are padded to it.

    rows[n, L]: their query tokens. keys[n, Hkv, K]: rows of their keys in a plane; unused entries repeat a key of the
    context. mask[n, 1, L, K]: True for keys that a query sees.
    """

    rows: mx.array
    keys: mx.array
    mask: mx.array


class GatherPool:
    """A plane is seen as rows of one token and KV head each."""

    def __init__(self, layout: KVLayout, memory: Memory) -> None:
        self._layout, self._num_kv_heads = layout, layout.num_kv_heads
        self._shapes = [(-1, plane.shape[-1]) for plane in layout.planes]
        self._memory = memory

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        heads, size = self._num_kv_heads, meta.block_size
        if ("written rows", heads) not in meta.derived:
            slots = meta.slot_mapping[:, None]
            matrices = slots // size * heads + mx.arange(heads)
            meta.derived["written rows", heads] = matrices * size + slots % size
        rows = meta.derived["written rows", heads]
        self._memory.write(self._shapes, rows, self._layout.rows(keys, values))

    def _read(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values at rows of the planes."""
        planes = [plane[rows] for plane in self._memory.seen_as(self._shapes)]
        if self._layout.quantization is not None:
            planes = self._layout.quantization.dequantize(planes)
        k, *others = planes
        return k, others[0] if others else k[..., : self._layout.value_size]

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        queries = options.whole(queries)
        key = ("gather", options.locality, self._num_kv_heads)
        if key not in meta.derived:
            make = make_groups if meta.step.num_repeats is None else make_ranges
            meta.derived[key] = make(meta, options.locality, self._num_kv_heads)
        if meta.step.num_repeats is not None:
            out = attend_in_ranges(queries, self._read, meta.derived[key], options)
            return self._memory.has_read(out)
        groups, order = meta.derived[key]
        outputs = []
        for group in groups:
            k, v = self._read(group.keys)
            q = queries[group.rows].swapaxes(1, 2)
            out = contiguous_attention(q, k, v, group.mask, options).swapaxes(1, 2)
            outputs.append(out.reshape(-1, *out.shape[2:]))
        return self._memory.has_read(mx.concatenate(outputs)[order])

    def read_context(self, meta: AttentionMetadata) -> mx.array:
        rows = rows_of(meta, np.zeros(1, int), np.arange(meta.step.context_lens[0])[None], self._num_kv_heads)
        return self._memory.has_read(self._memory.seen_as(self._shapes)[0][rows.squeeze(0)])


def make_groups(meta: AttentionMetadata, locality: Locality, num_kv_heads: int) -> tuple[list[Group], mx.array]:
    """One group for each number of query tokens, and the order that brings their outputs back. All decoding sequences
    of a step share one call."""
    lens = np.asarray(meta.step.query_lens)
    starts = np.concatenate(([0], np.cumsum(lens)))
    contexts = np.asarray(meta.step.context_lens)
    groups, all_rows = [], []
    for length in np.unique(lens).tolist():
        members = np.flatnonzero(lens == length)
        rows = starts[members, None] + np.arange(length)
        last = contexts[members] - 1
        first = locality.first_key(last - length + 1)
        position = first[:, None] + np.arange((last - first).max() + 1)
        query = (last - length + 1)[:, None, None] + np.arange(length)[:, None]
        last_keys = query
        if locality.looks_ahead(meta.step, members):
            last_keys = np.array([locality.last_keys(meta.step, i) for i in members.tolist()])[..., None]
        mask = (position[:, None] <= last_keys) & (position[:, None] >= locality.first_key(query))
        keys = rows_of(meta, members, np.minimum(position, last[:, None]), num_kv_heads)
        groups.append(Group(mx.array(rows), keys, mx.array(mask[:, None])))
        all_rows.append(rows.reshape(-1))
    return groups, mx.array(np.argsort(np.concatenate(all_rows)))


def contiguous_attention(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | Literal["causal"], options: Options
) -> mx.array:
    """[n, Hq, L, D] over [n, Hkv, K, D] and [n, Hkv, K, DV] -> [n, Hq, L, DV]. mask: [n, 1, L, K], or "causal" if the
    last query is at the last key. If the scores would take much memory, a fused kernel that keeps none is forced, or
    the queries are taken in tiles."""
    (n, num_heads, length, size), num_keys = queries.shape, keys.shape[2]
    can_fuse = options.softcap is None and size == values.shape[-1] and mx.default_device() != mx.Device(mx.cpu)
    rows = max(1, most_scores(options.softcap is not None) // (n * num_heads * num_keys))
    if rows >= length or (can_fuse and size in FUSED_SIZES):
        return attention(queries, keys, values, mask, options)
    if can_fuse and size in FORCED_SIZES:
        return attention(queries, keys, values, mask, options, force_fused=True)
    outputs: list[mx.array] = []
    for first in range(0, length, rows):
        tile = queries[:, :, first : first + rows]
        if outputs:  # one after the other: MLX might start all tiles, each with memory of its own
            tile = mx.depends(tile, outputs[-1])
        if isinstance(mask, str):
            seen = num_keys - length + min(first + rows, length)
            outputs.append(attention(tile, keys[:, :, :seen], values[:, :, :seen], mask, options))
        else:
            outputs.append(attention(tile, keys, values, mask[..., first : first + rows, :], options))
    return mx.concatenate(outputs, axis=2)


def most_scores(softcap: bool) -> int:
    """Returns how many scores one call may keep in each of its arrays."""
    return MAX_SCORES // SOFTCAP_ARRAYS if softcap else MAX_SCORES


def scores_bytes(shape: AttentionShape, tokens: int, context: int) -> int:
    """Returns the bytes of the scores that a chunk's attention keeps at once on a GPU."""
    layout = shape.layout
    if layout.key_size == layout.value_size and layout.key_size in FUSED_SIZES and not shape.softcap:
        return 0
    keys = context if shape.window is None else min(context, shape.window + tokens)
    scores = min(most_scores(shape.softcap), shape.num_query_heads * tokens * keys)
    if shape.softcap:
        return SOFTCAP_ARRAYS * mx.float32.size * scores
    return SCORE_ARRAYS * layout.dtype.size * scores


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | Literal["causal"],
    options: Options,
    force_fused: bool = False,
) -> mx.array:
    """`contiguous_attention` in one tile. force_fused: for MLX."""
    sinks = options.sinks
    if options.softcap is None:
        own_sinks = None if sinks is None else sinks.astype(queries.dtype)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=options.scale, mask=mask, sinks=own_sinks, force_fused=force_fused
        )
    (n, num_heads, length, size), num_keys = queries.shape, keys.shape[2]
    if isinstance(mask, str):
        mask = mx.arange(num_keys) <= mx.arange(num_keys - length, num_keys)[:, None]
    grouped = queries.astype(mx.float32).reshape(n, keys.shape[1], -1, length, size)
    scores = options.scale * (grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2))
    scores = options.softcap * mx.tanh(scores / options.softcap)
    scores = mx.where(mask, scores.reshape(n, num_heads, length, num_keys), -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (n, num_heads, length, 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :num_keys].reshape(*grouped.shape[:-1], num_keys)
    out = weights @ values.astype(mx.float32)[:, :, None]
    return out.reshape(n, num_heads, length, -1).astype(queries.dtype)
