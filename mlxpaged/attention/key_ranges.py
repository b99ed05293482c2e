"""Attention in fixed ranges of keys, by MLX's own operations: the gather backend of batch-invariant engines.

MLX chooses the kernel of a product or a sum by its shapes, and each kernel adds in an order of its own. So the shapes
here are always the same: a work item is one query token and one range of RANGE keys, and as many items as a step has
rows are computed at once. The results of a row's ranges are added in pairs. Ranges that only other rows have add zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import AttentionMetadata, distinct_rows
from mlxpaged.attention.pool import Locality, Options
from mlxpaged.attention.tile_schedule import counts_from_zero

RANGE = 128
"""Keys of a work item. Longer ranges copy more keys that no query sees, shorter ones take more operations."""


@dataclass(frozen=True)
class KeyRanges:
    """rows[N]: query token of each item. keys[N, Hkv, RANGE]: rows of its keys in a plane. mask[N, 1, 1, RANGE]: True
    for keys that the token sees. Items after the last one repeat the first, so that N is a multiple of the step's rows.

    parts[S, P]: the items of each row. is_part[S, P, 1, 1, 1]: False for unused entries. P: a power of two.
    """

    rows: mx.array
    keys: mx.array
    mask: mx.array
    parts: mx.array
    is_part: mx.array


def rows_of(meta: AttentionMetadata, sequences: Any, positions: Any, num_kv_heads: int) -> mx.array:
    """The rows [n, Hkv, K] of the keys at these positions [n, K] of n sequences, in a plane seen as [row, size]."""
    size = meta.block_size
    matrices = meta.host_block_tables[sequences[:, None], positions // size][:, None] * num_kv_heads
    matrices = matrices + np.arange(num_kv_heads)[:, None]
    return mx.array((matrices * size + (positions % size)[:, None]).astype(np.int32))


def make_ranges(meta: AttentionMetadata, locality: Locality, num_kv_heads: int) -> KeyRanges:
    distinct = distinct_rows(meta.step)
    size, count = len(distinct), distinct[-1] + 1
    last = np.asarray(meta.step.context_lens)[:count] - 1
    first = locality.first_key(last)
    first_range = first // RANGE
    counts = last // RANGE - first_range + 1
    row = np.repeat(np.arange(count), counts)
    row = np.concatenate([row, np.zeros(-len(row) % size, row.dtype)])
    part = np.zeros_like(row)
    part[: counts.sum()] = counts_from_zero(counts)
    position = ((first_range[row] + part) * RANGE)[:, None] + np.arange(RANGE)
    first_key, last_key = first[row, None], last[row, None]
    mask = (position >= first_key) & (position <= last_key)
    keys = rows_of(meta, row, np.clip(position, first_key, last_key), num_kv_heads)
    starts = np.cumsum(counts) - counts
    index = np.arange(1 << int(counts.max() - 1).bit_length())
    is_part = index < counts[:, None]
    parts = starts[:, None] + np.where(is_part, index, 0)
    return KeyRanges(
        mx.array(row),
        keys,
        mx.array(mask[:, None, None]),
        mx.array(parts[distinct]),
        mx.array(is_part[distinct][:, :, None, None, None]),
    )


def attend_in_ranges(
    queries: mx.array,
    read: Callable[[mx.array], tuple[mx.array, mx.array]],
    ranges: KeyRanges,
    options: Options,
) -> mx.array:
    """[S, Hq, D] over a pool -> [S, Hq, DV]. read: returns the keys and values at rows of its planes."""
    size, num_heads = queries.shape[:2]
    grouped = queries.astype(mx.float32).reshape(size, ranges.keys.shape[1], -1, queries.shape[2])
    partials: list[tuple[mx.array, mx.array, mx.array]] = []
    for first in range(0, len(ranges.rows), size):
        items = slice(first, first + size)
        keys = ranges.keys[items]
        if partials:  # one after the other: MLX might start all of them, each with memory of its own
            keys = mx.depends(keys, partials[-1])
        k, v = (part.astype(mx.float32) for part in read(keys))
        partials.append(attend_to_range(grouped[ranges.rows[items]], k, v, ranges.mask[items], options))
    best, total, weighted = (mx.concatenate(list(arrays))[ranges.parts] for arrays in zip(*partials, strict=True))
    best = mx.where(ranges.is_part, best, -mx.inf)
    peak = best.max(axis=1, keepdims=True)
    sinks = None if options.sinks is None else options.sinks.astype(mx.float32).reshape(1, 1, *grouped.shape[1:3], 1)
    if sinks is not None:
        peak = mx.maximum(peak, sinks)
    factor = mx.exp(best - peak)
    total, weighted = added(total * factor), added(weighted * factor)
    if sinks is not None:
        total = total + mx.exp(sinks - peak)[:, 0]
    return (weighted / total).reshape(size, num_heads, -1).astype(queries.dtype)


def attend_to_range(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array, options: Options
) -> tuple[mx.array, mx.array, mx.array]:
    """[n, Hkv, G, D] over [n, Hkv, RANGE, D] and [n, Hkv, RANGE, DV]: the largest score of each query, the sum of its
    weights, and the weighted sum of the values, before division."""
    scores = options.scale * (queries @ keys.swapaxes(-1, -2))
    if options.softcap is not None:
        scores = options.softcap * mx.tanh(scores / options.softcap)
    scores = mx.where(mask, scores, -mx.inf)
    best = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - best)
    return best, weights.sum(axis=-1, keepdims=True), weights @ values


def added(parts: mx.array) -> mx.array:
    """[S, P, ...] -> [S, ...]. It adds neighbours, so more zeros at the end change no bit. A sum over the axis may add
    in an order that depends on P."""
    while parts.shape[1] > 1:
        parts = parts[:, ::2] + parts[:, 1::2]
    return parts[:, 0]
