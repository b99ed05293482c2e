"""The gather backend: paged attention in MLX operations, on any device. The oracle and the fallback.

Decoding sequences are attended block by block, all of a step at once: every pair of a sequence and one of its blocks
is a small matrix product that reads the block where it lies in the pool. Each pair gives a softmax of its own; a
sequence's pairs are put together by their peaks and sums, as FlashDecoding does. Blocks that several sequences share,
a system prompt's, are attended by all of these at once, and count as one part of each. Prompt chunks amortise a copy
over their many queries: their keys become contiguous; so do the keys of shared blocks.

Powers of two take the place of exponentials: the scores are scaled by log2(e) first. On a CPU, MLX takes twice as long
for exp as for a power, and attention spends more time on these than on its products (powers.py). There all of it is
shared out among the cores (lanes.py): decoding by pairs, prompts and shared blocks by KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.attention.constants import constant
from mlxpaged.attention.gather_plan import Decodes, LanedChunk, Pairs, Plan, PromptChunk, SharedRun, make_plan
from mlxpaged.attention.lanes import assign
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Options
from mlxpaged.attention.powers import power_of

LOG2E = math.log2(math.e)


class KV(NamedTuple):
    """Keys and values of a layer, [block * Hkv + kv_head, slot, dim] each: every KV head of a block is a contiguous
    matrix, which is read where it lies, and whole blocks are gathered as one contiguous run each."""

    keys: mx.array
    values: mx.array
    num_kv_heads: int


class GatherPool:
    """Keys and values in blocks, laid out as `KV` says."""

    def __init__(self, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype, block_size: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._keys = mx.zeros((num_blocks * num_kv_heads, block_size, head_dim), dtype)
        self._values = mx.zeros((num_blocks * num_kv_heads, block_size, head_dim), dtype)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self._keys, self._values

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        at = places_of_slots(meta, self._num_kv_heads)
        self._keys[at] = keys
        self._values[at] = values
        behind = places_behind(meta, self._num_kv_heads)
        if behind is not None:
            zeros = constant(0, (*behind[0].shape, keys.shape[-1]), keys.dtype)
            self._keys[behind] = zeros
            self._values[behind] = zeros

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        return attend(queries, KV(self._keys, self._values, self._num_kv_heads), meta, options)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.write_blocks(targets, *self.read_blocks(sources))

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        at = self._places(ids)
        keys, values = self._keys[at], self._values[at]
        mx.eval(keys, values)  # a read that is still pending would make the next write copy the whole pool
        return keys, values

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        at = self._places(ids)
        self._keys[at] = keys
        self._values[at] = values

    def _places(self, ids: Sequence[int]) -> mx.array:
        """Of whole blocks, [block, kv_head]."""
        return mx.array(list(ids), dtype=mx.int32)[:, None] * self._num_kv_heads + mx.arange(self._num_kv_heads)


def places_of_slots(meta: AttentionMetadata, num_kv_heads: int) -> tuple[mx.array, mx.array]:
    """Where in a pool the step's tokens are written to: block and KV head as one number, and slot, both
    [T, num_kv_heads]."""
    key = ("slots", num_kv_heads)
    if key not in meta.derived:
        block, offset = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
        places = block[:, None] * num_kv_heads + mx.arange(num_kv_heads)
        meta.derived[key] = places, mx.broadcast_to(offset[:, None], places.shape)
    at: tuple[mx.array, mx.array] = meta.derived[key]
    return at


def places_behind(meta: AttentionMetadata, num_kv_heads: int) -> tuple[mx.array, mx.array] | None:
    """The same of the slots behind the contexts, in blocks that begin with this step, if there are any: [n] each.

    Decoding reads such a block whole. Scores there become minus infinity and weights zero, but neither removes the NaN
    which an earlier owner may have left among the keys or values.
    """
    key = ("behind", num_kv_heads)
    if key not in meta.derived:
        context, query = np.asarray(meta.host_context_lens), np.asarray(meta.host_query_lens)
        last, filled = (context - 1) // meta.block_size, (context - 1) % meta.block_size + 1
        begins = np.flatnonzero((context - query <= last * meta.block_size) & (filled < meta.block_size))
        blocks = meta.host_block_tables[begins, last[begins]]
        which, slots = np.nonzero(np.arange(meta.block_size) >= filled[begins, None])
        places = blocks[which][:, None] * num_kv_heads + np.arange(num_kv_heads)
        at = np.stack((places, np.broadcast_to(slots[:, None], places.shape))).reshape(2, -1).astype(np.int32)
        meta.derived[key] = tuple(mx.array(at)) if len(begins) else None
    behind: tuple[mx.array, mx.array] | None = meta.derived[key]
    return behind


def attend(queries: mx.array, kv: KV, meta: AttentionMetadata, options: Options) -> mx.array:
    """[T, Hq, D] -> [T, Hq, D]"""
    heads = queries.shape[1], kv.num_kv_heads
    key = ("plan", options.window, heads)
    if key not in meta.derived:
        meta.derived[key] = make_plan(meta, options.window, *heads)
    plan: Plan = meta.derived[key]
    outputs = [attend_chunk(queries[laned.chunk.rows], kv, laned, options) for laned in plan.chunks]
    if plan.decodes is not None:
        outputs.insert(0, attend_decodes(queries[plan.decodes.rows], kv, plan.decodes, options))
    out = mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    return out if plan.order is None else out[plan.order]


def attend_decodes(queries: mx.array, kv: KV, plan: Decodes, options: Options) -> mx.array:
    """[n, Hq, D] -> [n, Hq, D]: every part by itself, then the parts of each sequence put together."""
    n, num_heads, dim = queries.shape
    num_kv_heads, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
    grouped = scaled(queries, options).reshape(n * num_kv_heads, group, dim)
    turned = kv._replace(keys=kv.keys.swapaxes(-1, -2))
    parts = []
    for pairs, on in assign(plan.pairs):
        with on:
            parts.append(attend_pairs(grouped, turned, pairs, options))
    if plan.shared:
        whole = grouped.reshape(n, num_kv_heads, group, dim)
        parts += [attend_shared(whole[run.members], kv, run, options) for run in plan.shared]
    out, peak, total = join(parts)
    if plan.owner is not None:
        out, peak, total = add_up(out, peak, total, plan.owner, n * num_kv_heads)
        out, peak, total = (array.reshape(n, 1, num_kv_heads, *array.shape[1:]) for array in (out, peak, total))
    elif plan.parts is None:
        out, peak, total = (array.reshape(n, -1, num_kv_heads, *array.shape[1:]) for array in (out, peak, total))
    else:
        out, peak, total = (array[plan.parts] for array in (out, peak, total))
    if plan.padding is not None:
        peak = peak + plan.padding
    return merge_parts(out, peak, total, options.sinks).astype(queries.dtype).reshape(n, num_heads, dim)


def attend_pairs(queries: mx.array, turned: KV, plan: Pairs, options: Options) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [n * Hkv, group, D] and keys [num_blocks * Hkv, D, slot]: for each pair and KV head the weighted sum of
    values [P * Hkv, group, D], the highest score and the sum of weights, both [P * Hkv, group, 1].

    Blocks are read whole: what is behind a context is zero (`places_behind`), what is before a window its own
    sequence's.
    """
    products = matmul_at(queries, plan.queries, turned.keys, plan.blocks)
    weights, peak, total = powers(binary_scores(products, options.softcap) + plan.bias)
    values = turned.values

    def product(own: mx.array) -> mx.array:
        return matmul_at(own, plan.order, values, plan.blocks)

    return weighted_sum(weights, total, values.dtype, product), peak, total


def attend_shared(queries: mx.array, kv: KV, run: SharedRun, options: Options) -> tuple[mx.array, mx.array, mx.array]:
    """As `attend_pairs`, for each of the run's m members: queries [m, Hkv, group, D] to parts [m * Hkv, group, ...]."""
    m, num_kv_heads, group, dim = queries.shape
    stacked = queries.swapaxes(0, 1).reshape(num_kv_heads, m * group, dim)
    parts = []
    for share, on in assign(run.shares):
        with on:
            keys, values = (contiguous(blocks, share.places) for blocks in (kv.keys, kv.values))
            scores = binary_scores(stacked[share.heads] @ keys.swapaxes(-1, -2), options.softcap)
            parts.append(weighted_sums(scores, values))
    joined = (array.reshape(num_kv_heads, m, group, -1).swapaxes(0, 1) for array in join(parts))
    out, peak, total = (array.reshape(m * num_kv_heads, group, -1) for array in joined)
    return out, peak, total


def add_up(
    out: mx.array, peak: mx.array, total: mx.array, owner: mx.array, n: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The parts of each of n owners as one part."""
    highest = mx.full((n, *peak.shape[1:]), -mx.inf).at[owner].maximum(peak)
    share = power_of(2, peak - highest[owner])
    total = mx.zeros(highest.shape).at[owner].add(share * total)
    out = mx.zeros((n, *out.shape[1:])).at[owner].add(share * out)
    return out, highest, total


def merge_parts(out: mx.array, peak: mx.array, total: mx.array, sinks: mx.array | None) -> mx.array:
    """[n, b, Hkv, group, D] and twice [n, b, Hkv, group, 1], of b parts, to the attention [n, 1, Hkv, group, D]."""
    highest = peak.max(axis=1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, 1, *peak.shape[2:]) * LOG2E
        highest = mx.maximum(highest, sinks)
    share = power_of(2, peak - highest)
    total = (share * total).sum(axis=1, keepdims=True)
    if sinks is not None:
        total = total + power_of(2, sinks - highest)
    return (share * out).sum(axis=1, keepdims=True) / total


def matmul_at(left: mx.array, left_at: mx.array, right: mx.array, right_at: mx.array) -> mx.array:
    """The products `left[left_at[i]] @ right[right_at[i]]`. In float32 nothing is copied; MLX's CPU has that for no
    other type."""
    if left.dtype == mx.float32:
        return mx.gather_mm(left, right, lhs_indices=left_at, rhs_indices=right_at)
    return left[left_at] @ right[right_at]


def attend_chunk(queries: mx.array, kv: KV, laned: LanedChunk, options: Options) -> mx.array:
    """[L, Hq, D] -> [L, Hq, D], over keys made contiguous."""
    by_head = queries.swapaxes(0, 1)
    group = laned.chunk.group
    outputs = []
    for share, on in assign(laned.shares):
        with on:
            keys, values = (contiguous(blocks, share.places) for blocks in (kv.keys, kv.values))
            heads = slice(share.heads.start * group, share.heads.stop * group)
            own = options if options.sinks is None else options._replace(sinks=options.sinks[heads])
            outputs.append(attend_contiguous(by_head[heads], keys, values, laned.chunk, own))
    return (mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]).swapaxes(0, 1)


def contiguous(blocks: mx.array, places: mx.array) -> mx.array:
    """[num_blocks * Hkv, slot, D] and places [heads, n] -> [heads, n * slot, D], a copy."""
    return blocks[places].reshape(len(places), -1, blocks.shape[-1])


def has_fused_attention() -> bool:
    """Whether MLX's own attention is one kernel here. On a CPU it is made of operations that take the whole square of
    scores, masked half included, through exp: twice the time of `attend_tile` for 512 tokens."""
    return mx.default_device() == mx.Device(mx.gpu)


def attend_contiguous(
    queries: mx.array, keys: mx.array, values: mx.array, chunk: PromptChunk, options: Options
) -> mx.array:
    """[Hq, L, D] -> [Hq, L, D], over the chunk's keys and values [Hkv, n, D], of which the first num_keys count."""
    if options.softcap is not None or not has_fused_attention():
        num_heads, _, dim = queries.shape
        turned = keys.swapaxes(-1, -2)
        queries = scaled(queries, options)
        outputs: list[mx.array] = []
        for tile in chunk.tiles:
            some = queries[:, tile.rows].reshape(len(keys), -1, dim)
            if outputs:  # one after the other: MLX would begin them all, each with memory of its own
                some = mx.depends(some, outputs[-1])
            out = attend_tile(some, turned[..., tile.keys], values[:, tile.keys], tile.bias, options)
            outputs.append(out.reshape(num_heads, -1, dim))
        return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]
    out = mx.fast.scaled_dot_product_attention(
        queries[None],
        keys[None, :, : chunk.num_keys],
        values[None, :, : chunk.num_keys],
        scale=options.scale,
        mask="causal" if chunk.window is None else chunk.visible,
        sinks=None if options.sinks is None else options.sinks.astype(queries.dtype),
    )
    return out[0]


def attend_tile(queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array, options: Options) -> mx.array:
    """`scaled` queries [Hkv, group * L, D] -> the same, over keys [Hkv, D, n], values [Hkv, n, D]; bias[1, group * L,
    n]."""
    scores = binary_scores(queries @ keys, options.softcap) + bias
    sinks = options.sinks
    if sinks is not None:
        each = sinks.astype(mx.float32).reshape(len(queries), -1, 1, 1) * LOG2E
        length = queries.shape[1] // each.shape[1]
        sinks = mx.broadcast_to(each, (*each.shape[:2], length, 1)).reshape(*queries.shape[:2], 1)
    out, _, total = weighted_sums(scores, values, sinks)
    return (out / total).astype(queries.dtype)


def weighted_sums(
    scores: mx.array, values: mx.array, sinks: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Scores [Hkv, n, keys] and values [Hkv, keys, D] to weighted sums [Hkv, n, D] in float32, with the weights' peaks
    and totals [Hkv, n, 1]."""
    weights, peak, total = powers(scores, sinks)
    return weighted_sum(weights, total, values.dtype, lambda own: own @ values), peak, total


def join(parts: Sequence[tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array, mx.array]:
    """Along the first axis, each of the three."""
    if len(parts) == 1:
        return parts[0]
    first, second, third = (mx.concatenate(list(same)) for same in zip(*parts, strict=True))
    return first, second, third


def weighted_sum(
    weights: mx.array, total: mx.array, dtype: mx.Dtype, product: Callable[[mx.array], mx.array]
) -> mx.array:
    """The product of the weights and values of `dtype`, in float32; total: of the weights. The product is of the
    values' type, and the sum over many keys may pass what float16 holds, 65,504: there their mean is taken first."""
    if dtype == mx.float16:
        return product((weights / total).astype(dtype)).astype(mx.float32) * total
    return product(weights.astype(dtype)).astype(mx.float32)


def is_exact(queries: mx.array, options: Options) -> bool:
    """Whether log2(e) can be a part of the scale. Half types would lose digits by it."""
    return queries.dtype == mx.float32 and options.softcap is None


def scaled(queries: mx.array, options: Options) -> mx.array:
    """What `binary_scores` wants the products of."""
    scale = options.scale * LOG2E if is_exact(queries, options) else options.scale
    return queries * constant(scale, queries.shape, queries.dtype)


def binary_scores(products: mx.array, softcap: float | None) -> mx.array:
    """From products of keys and `scaled` queries to float32 scores whose powers of two are the weights."""
    if softcap is not None:
        return (softcap * LOG2E) * mx.tanh(products.astype(mx.float32) / softcap)
    return products if products.dtype == mx.float32 else products.astype(mx.float32) * LOG2E


def powers(scores: mx.array, sinks: mx.array | None = None) -> tuple[mx.array, mx.array, mx.array]:
    """Softmax over the last axis as weights, with their peak and their total, each [..., 1]. A sink adds to the total
    alone."""
    peak = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        peak = mx.maximum(peak, sinks)
    weights = power_of(2, scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, peak, total if sinks is None else total + power_of(2, sinks - peak)
