"""Attention of the "cpu" backend over blocks in place.

Decoding sequences are attended in (sequence, block) pairs, all of a step at once: each pair is a small matrix product
that reads the block in the pool and has a softmax of its own. The pairs of a sequence are merged by their maxima and
denominators, as in FlashDecoding. Blocks that several sequences share are attended once for all of them (cascade
attention). Keys of prompt chunks and of shared blocks are copied, because many queries read them.

Scores are scaled by log2(e), so that powers of two replace exponentials: attention spends more time on these than on
products (exp2.py). Pairs, and the KV heads of chunks and shared blocks, are split among CPU streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from mlxpaged.cpu.attention_plan import ChunkPlan, DecodePlan, Pairs, Plan, SharedRun
from mlxpaged.cpu.exp2 import LOG2E, exp2
from mlxpaged.cpu.streams import assign

if TYPE_CHECKING:
    from mlxpaged.attention.pool import Options


class KV(NamedTuple):
    """Keys and values [block * Hkv + kv_head, slot, size]: each (block, KV head) is one contiguous matrix."""

    keys: mx.array
    values: mx.array
    num_kv_heads: int


class Partial(NamedTuple):
    """Softmax over some of the keys, in float32: output [..., D] before division, maximum and denominator [..., 1]."""

    output: mx.array
    maximum: mx.array
    denominator: mx.array


def attend(queries: mx.array, kv: KV, plan: Plan, options: Options) -> mx.array:
    """[T, Hq, D] -> [T, Hq, D]"""
    outputs = [attend_chunk(queries[chunk.rows], kv, chunk, options) for chunk in plan.chunks]
    if plan.decode is not None:
        outputs.insert(0, attend_decode(queries[plan.decode.rows], kv, plan.decode, options))
    out = mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    return out if plan.order is None else out[plan.order]


def attend_decode(queries: mx.array, kv: KV, plan: DecodePlan, options: Options) -> mx.array:
    """[n, Hq, D] -> [n, Hq, D]"""
    n, num_heads, size = queries.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    grouped = scaled(queries, options).reshape(n * num_kv_heads, group, size)
    transposed = kv._replace(keys=kv.keys.swapaxes(-1, -2))
    partials = []
    for pairs, stream in assign(plan.pairs):
        with stream:
            partials.append(attend_pairs(grouped, transposed, pairs, options))
    if plan.shared:
        whole = grouped.reshape(n, num_kv_heads, group, size)
        partials += [attend_shared(whole[run.members], kv, run, options) for run in plan.shared]
    parts = concatenate(partials)
    if plan.owner is not None:
        parts = scatter_merge(parts, plan.owner, n * num_kv_heads)
    if plan.parts is not None:
        by_owner = Partial(*(array[plan.parts] for array in parts))
    else:
        by_owner = Partial(*(array.reshape(n, -1, num_kv_heads, *array.shape[1:]) for array in parts))
    if plan.padding is not None:
        by_owner = by_owner._replace(maximum=by_owner.maximum + plan.padding)
    return merge(by_owner, options.sinks).astype(queries.dtype).reshape(n, num_heads, -1)


def attend_pairs(queries: mx.array, transposed: KV, pairs: Pairs, options: Options) -> Partial:
    """Queries [n * Hkv, group, D] over keys [num_blocks * Hkv, D, slot] -> [P * Hkv, group, ...].

    Blocks are read whole: the pool keeps unused tail slots zero, and slots before a window are the sequence's own.
    """
    products = matmul_at(queries, pairs.queries, transposed.keys, pairs.matrices)
    scores, values = binary_scores(products, options.softcap) + pairs.bias, transposed.values
    return attend_scores(scores, values.dtype, lambda own: matmul_at(own, pairs.order, values, pairs.matrices))


def attend_shared(queries: mx.array, kv: KV, run: SharedRun, options: Options) -> Partial:
    """Queries [m, Hkv, group, D] of the run's m members -> [m * Hkv, group, ...]"""
    m, num_kv_heads, group, size = queries.shape
    stacked = queries.swapaxes(0, 1).reshape(num_kv_heads, m * group, size)
    partials = []
    for split, stream in assign(run.splits):
        with stream:
            keys, values = (contiguous(array, split.matrices) for array in (kv.keys, kv.values))
            scores = binary_scores(stacked[split.heads] @ keys.swapaxes(-1, -2), options.softcap)
            partials.append(attend_scores(scores, values.dtype, functools.partial(times, values)))
    by_member = (array.reshape(num_kv_heads, m, group, -1).swapaxes(0, 1) for array in concatenate(partials))
    return Partial(*(array.reshape(m * num_kv_heads, group, -1) for array in by_member))


def attend_chunk(queries: mx.array, kv: KV, chunk: ChunkPlan, options: Options) -> mx.array:
    """[L, Hq, D] -> [L, Hq, D]"""
    by_head = queries.swapaxes(0, 1)
    grouped = by_head.reshape(kv.num_kv_heads, -1, *by_head.shape[1:])
    outputs = []
    for split, stream in assign(chunk.splits):
        with stream:
            keys, values = (contiguous(array, split.matrices) for array in (kv.keys, kv.values))
            own = scaled(grouped[split.heads], options)
            outputs.append(attend_tiles(own, keys.swapaxes(-1, -2), values, chunk, split.heads, options))
    out = mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    return out.reshape(queries.shape[1], len(queries), -1).swapaxes(0, 1)


def attend_tiles(
    queries: mx.array, keys: mx.array, values: mx.array, chunk: ChunkPlan, heads: slice, options: Options
) -> mx.array:
    """[H, group, L, D] over keys [H, D, n] and values [H, n, D] of H KV heads -> [H, group, L, D]"""
    num_kv_heads, group, _, size = queries.shape
    sinks = options.sinks
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(-1, group, 1, 1)[heads] * LOG2E
    outputs: list[mx.array] = []
    for tile in chunk.tiles:
        own = queries[:, :, tile.rows].reshape(num_kv_heads, -1, size)
        if outputs:  # one after the other: MLX would start all tiles, each with memory of its own
            own = mx.depends(own, outputs[-1])
        scores = binary_scores(own @ keys[..., tile.keys], options.softcap) + tile.bias
        sink_rows = None
        if sinks is not None:
            length = own.shape[1] // group
            sink_rows = mx.broadcast_to(sinks, (num_kv_heads, group, length, 1)).reshape(num_kv_heads, -1, 1)
        result = attend_scores(scores, values.dtype, functools.partial(times, values[:, tile.keys]), sink_rows)
        out = (result.output / result.denominator).astype(queries.dtype)
        outputs.append(out.reshape(num_kv_heads, group, -1, out.shape[-1]))
    return mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]


def attend_scores(
    scores: mx.array, dtype: mx.Dtype, product: Callable[[mx.array], mx.array], sinks: mx.array | None = None
) -> Partial:
    """Softmax over the last axis of scores. product: multiplies weights by values of `dtype`. A sink adds to the
    denominator only."""
    maximum = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        maximum = mx.maximum(maximum, sinks)
    weights = exp2(scores - maximum)
    denominator = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        denominator = denominator + exp2(sinks - maximum)
    if dtype != mx.float16:
        return Partial(product(weights.astype(dtype)).astype(mx.float32), maximum, denominator)
    # A sum over many keys may pass 65,504, the largest float16, so the mean is computed first.
    mean = product((weights / denominator).astype(dtype)).astype(mx.float32)
    return Partial(mean * denominator, maximum, denominator)


def times(values: mx.array, weights: mx.array) -> mx.array:
    return weights @ values


def merge(parts: Partial, sinks: mx.array | None) -> mx.array:
    """Merge partials [n, b, Hkv, group, ...] along b and divide -> [n, 1, Hkv, group, D]"""
    maximum = parts.maximum.max(axis=1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, 1, *maximum.shape[2:]) * LOG2E
        maximum = mx.maximum(maximum, sinks)
    rescale = exp2(parts.maximum - maximum)
    denominator = (rescale * parts.denominator).sum(axis=1, keepdims=True)
    if sinks is not None:
        denominator = denominator + exp2(sinks - maximum)
    return (rescale * parts.output).sum(axis=1, keepdims=True) / denominator


def scatter_merge(parts: Partial, owner: mx.array, n: int) -> Partial:
    """Merge the parts of each of n owners into one."""
    maximum = mx.full((n, *parts.maximum.shape[1:]), -mx.inf).at[owner].maximum(parts.maximum)
    rescale = exp2(parts.maximum - maximum[owner])
    output = mx.zeros((n, *parts.output.shape[1:])).at[owner].add(rescale * parts.output)
    return Partial(output, maximum, mx.zeros(maximum.shape).at[owner].add(rescale * parts.denominator))


def concatenate(partials: Sequence[Partial]) -> Partial:
    if len(partials) == 1:
        return partials[0]
    return Partial(*(mx.concatenate(list(arrays)) for arrays in zip(*partials, strict=True)))


def contiguous(matrices: mx.array, indices: mx.array) -> mx.array:
    """[num_blocks * Hkv, slot, D] and indices [H, n] -> [H, n * slot, D], a copy."""
    return matrices[indices].reshape(len(indices), -1, matrices.shape[-1])


def matmul_at(left: mx.array, left_at: mx.array, right: mx.array, right_at: mx.array) -> mx.array:
    """`left[left_at[i]] @ right[right_at[i]]` for all i. Float32 is not copied; MLX's CPU backend supports no other."""
    if left.dtype == mx.float32:
        return mx.gather_mm(left, right, lhs_indices=left_at, rhs_indices=right_at)
    return left[left_at] @ right[right_at]


def scaled(queries: mx.array, options: Options) -> mx.array:
    """Queries for `binary_scores`: log2(e) is part of the scale for float32; half types would lose digits by it."""
    exact = queries.dtype == mx.float32 and options.softcap is None
    return queries * (options.scale * LOG2E if exact else options.scale)


def binary_scores(products: mx.array, softcap: float | None) -> mx.array:
    """Products of keys and `scaled` queries -> float32 scores in units of log2."""
    if softcap is not None:
        return (softcap * LOG2E) * mx.tanh(products.astype(mx.float32) / softcap)
    return products if products.dtype == mx.float32 else products.astype(mx.float32) * LOG2E
