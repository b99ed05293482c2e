"""Attention of the "cpu" backend over blocks in place.

Decoding sequences are attended in pieces with as many blocks each, all of a step at once: each block is a small matrix
product that reads the pool, and each piece has a softmax of its own. Where sequences have several pieces, these are
merged by their maxima and denominators, as in FlashDecoding. A prefix that several sequences share is attended once for
all of them (cascade attention). Keys of prompt chunks and of shared blocks are copied, because many queries read them.

Scores are scaled by log2(e), so that powers of two replace exponentials: attention spends more time on these than on
matrix products (exp2.py). Pieces, shared blocks and the KV heads of prompts are split among CPU streams.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from mlxpaged.cpu.attention_plan import ChunkPlan, DecodePlan, Pieces, Plan, SharedRun
from mlxpaged.cpu.exp2 import LOG2E, exp2
from mlxpaged.cpu.streams import assign

if TYPE_CHECKING:
    from mlxpaged.attention.pool import Options


class KV(NamedTuple):
    """Keys and values [block * Hkv + kv_head, slot, size]: each (block, KV head) is one contiguous matrix.

    The values of a latent layout are its keys, because a product with a part of them would copy the pool. value_size:
    the columns of an output that count.
    """

    keys: mx.array
    values: mx.array
    num_kv_heads: int
    value_size: int


class Partial(NamedTuple):
    """Softmax over some of the keys, in float32: output [..., size] before division, maximum and denominator
    [..., 1]."""

    output: mx.array
    maximum: mx.array
    denominator: mx.array


def attend(queries: mx.array, kv: KV, plan: Plan, options: Options) -> mx.array:
    """[T, Hq, key_size] -> [T, Hq, value_size]"""
    outputs = [attend_chunk(queries[chunk.rows], kv, chunk, options) for chunk in plan.chunks]
    if plan.decode is not None:
        outputs.insert(0, attend_decode(queries[plan.decode.rows], kv, plan.decode, options))
    out = mx.concatenate(outputs)
    if kv.values is kv.keys:
        out = out[..., : kv.value_size]
    return out if plan.order is None else out[plan.order]


def attend_decode(queries: mx.array, kv: KV, plan: DecodePlan, options: Options) -> mx.array:
    """[n, Hq, key_size] -> [n, Hq, size of kv.values]"""
    n, num_heads, size = queries.shape
    grouped = scaled(queries, options).reshape(n * kv.num_kv_heads, -1, size)
    partials = []
    for part, stream in itertools.chain.from_iterable(map(assign, plan.work)):
        with stream:
            if isinstance(part, Pieces):
                partials.append(attend_pieces(grouped, kv, part, options))
            else:
                partials.append(attend_shared(grouped, kv, part, options))
    sinks = None if options.sinks is None else mx.tile(options.sinks, n).reshape(len(grouped), -1, 1)
    parts = Partial(*map(mx.concatenate, map(list, zip(*partials, strict=True))))
    if plan.merged is not None or len(parts.output) > len(grouped):
        parts = merge(parts, plan, len(grouped))
    return finish(parts, sinks).astype(queries.dtype).reshape(n, num_heads, -1)


def merge(parts: Partial, plan: DecodePlan, num_rows: int) -> Partial:
    """The partial softmax of each query row of those of its parts: [part, group, ...] -> [num_rows, group, ...]"""
    if plan.merged is None:
        parts = Partial(*(array.reshape(num_rows, -1, *array.shape[1:]) for array in parts))
    else:
        parts = Partial(*(array[plan.merged] for array in parts))
        parts = parts._replace(maximum=parts.maximum + plan.padding)
    maximum = parts.maximum.max(axis=1, keepdims=True)
    rescale = exp2(parts.maximum - maximum)
    output, denominator = ((rescale * array).sum(axis=1) for array in (parts.output, parts.denominator))
    return Partial(output, maximum.squeeze(1), denominator)


def attend_pieces(queries: mx.array, kv: KV, pieces: Pieces, options: Options) -> Partial:
    """Queries [n * Hkv, group, D] -> [row, group, ...]. Blocks are read whole: the pool keeps unused tail slots zero,
    and slots before a window are the sequence's own."""
    products = matmul_at(queries, pieces.queries, kv.keys.swapaxes(-1, -2), pieces.matrices)
    return attend_scores(binary_scores(products, options.softcap) + pieces.bias, kv.values, pieces)


def attend_shared(queries: mx.array, kv: KV, run: SharedRun, options: Options) -> Partial:
    """Queries [n * Hkv, group, D] -> [Hkv * m, group, ...]"""
    keys = contiguous(kv.keys, run.matrices)
    values = keys if kv.values is kv.keys else contiguous(kv.values, run.matrices)
    stacked = queries[run.queries].flatten(1, 2)
    partial = attend_scores(binary_scores(stacked @ keys.swapaxes(-1, -2), options.softcap), values)
    return Partial(*(array.reshape(run.queries.size, queries.shape[1], -1) for array in partial))


def attend_chunk(queries: mx.array, kv: KV, chunk: ChunkPlan, options: Options) -> mx.array:
    """[L, Hq, key_size] -> [L, Hq, size of kv.values]"""
    length, _, size = queries.shape
    grouped = scaled(queries, options).swapaxes(0, 1).reshape(kv.num_kv_heads, -1, length, size)
    sinks = None if options.sinks is None else options.sinks.reshape(kv.num_kv_heads, -1, 1, 1)
    outputs = []
    for part, stream in assign(chunk.parts):
        with stream:
            rows_of_keys = contiguous(kv.keys, part.matrices)
            keys = rows_of_keys.swapaxes(-1, -2)
            values = rows_of_keys if kv.values is kv.keys else contiguous(kv.values, part.matrices)
            tiles: list[mx.array] = []
            for tile in chunk.tiles:
                own = grouped[part.heads, :, tile.rows]
                rows = own.shape[:-1]
                own = own.flatten(1, 2)
                if tiles:  # one after the other: MLX would start all tiles, each with memory of its own
                    own = mx.depends(own, tiles[-1])
                partial = attend_scores(
                    binary_scores(own @ keys[..., tile.keys], options.softcap) + tile.bias, values[:, tile.keys]
                )
                row_sinks = None if sinks is None else mx.broadcast_to(sinks[part.heads], (*rows, 1)).flatten(1, 2)
                tiles.append(finish(partial, row_sinks).astype(queries.dtype).reshape(*rows, -1))
            outputs.append(mx.concatenate(tiles, axis=2))
    return mx.concatenate(outputs).flatten(0, 1).swapaxes(0, 1)


def attend_scores(scores: mx.array, values: mx.array, pieces: Pieces | None = None) -> Partial:
    """Softmax over the last axis of scores, times values; of `pieces`, [row, block, group, slot], over the blocks too,
    times the values of each."""
    maximum = scores.max(axis=-1, keepdims=True)
    if pieces is not None:
        maximum = maximum.max(axis=1, keepdims=True)
    weights = exp2(scores - maximum)
    denominator = weights.sum(axis=-1, keepdims=True)
    if pieces is not None:
        denominator = denominator.sum(axis=1, keepdims=True)
    half = values.dtype == mx.float16
    if half:  # a sum over many keys may pass 65,504, the largest float16, so the mean is computed first
        weights = weights / denominator
    weights = weights.astype(values.dtype)
    if pieces is None:
        output = (weights @ values).astype(mx.float32)
    else:
        output = matmul_at(weights, pieces.order, values, pieces.matrices).astype(mx.float32).sum(axis=1)
        maximum, denominator = maximum.squeeze(1), denominator.squeeze(1)
    return Partial(output * denominator if half else output, maximum, denominator)


def finish(partial: Partial, sinks: mx.array | None) -> mx.array:
    """The output of all keys. A sink adds to the denominator only; one that exceeds every score by far makes it 0."""
    if sinks is None:
        return partial.output / partial.denominator
    return partial.output / (partial.denominator + exp2(sinks.astype(mx.float32) * LOG2E - partial.maximum))


def contiguous(matrices: mx.array, indices: mx.array) -> mx.array:
    """[num_blocks * Hkv, slot, D] and indices [H, n] -> [H, n * slot, D], a copy."""
    return matrices[indices].flatten(1, 2)


def matmul_at(left: mx.array, left_at: mx.array, right: mx.array, right_at: mx.array) -> mx.array:
    """`left[left_at[i]] @ right[right_at[i]]` for all i. Indices count the matrices over all axes before the last two.
    Float32 is not copied; MLX's CPU backend supports no other."""
    if left.dtype == mx.float32:
        return mx.gather_mm(left, right, lhs_indices=left_at, rhs_indices=right_at)
    return left.flatten(0, -3)[left_at] @ right[right_at]


def scaled(queries: mx.array, options: Options) -> mx.array:
    """Queries for `binary_scores`: log2(e) is part of the scale for float32; half types would lose digits by it."""
    exact = queries.dtype == mx.float32 and options.softcap is None
    return queries * (options.scale * LOG2E if exact else options.scale)


def binary_scores(products: mx.array, softcap: float | None) -> mx.array:
    """Products of keys and `scaled` queries -> float32 scores in units of log2."""
    if softcap is not None:
        return (softcap * LOG2E) * mx.tanh(products.astype(mx.float32) / softcap)
    return products if products.dtype == mx.float32 else products.astype(mx.float32) * LOG2E
