"""The gather backend: paged attention in MLX operations, on any device. The oracle and the fallback.

Decoding sequences are attended block by block, all of a step at once: every pair of a sequence and one of its blocks
is a small matrix product that reads the block where it lies in the pool. Each pair gives a softmax of its own; a
sequence's pairs are put together by their peaks and sums, as FlashDecoding does. Blocks that several sequences share,
a system prompt's, are attended by all of these at once, and count as one part of each. Prompt chunks amortise a copy
over their many queries: their keys become contiguous; so do the keys of shared blocks.

Powers of two take the place of exponentials: the scores are scaled by log2(e) first. On a CPU, MLX takes 9 ns for exp
and 3 ns for a power, and attention spends more time on these than on its products. There all of it is shared out among
the cores (lanes.py): decoding by pairs, prompts and shared blocks by KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxpaged.attention.gather_plan import Decodes, Pairs, Plan, PromptChunk, SharedRun, make_plan
from mlxpaged.attention.lanes import contexts, lanes
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Options

LOG2E = math.log2(math.e)

SCORE = 10e-9
"""Seconds for a query and a key, on one core: their product, its power, and the product with the value."""


class GatherPool:
    """Keys and values in blocks of [kv_head, slot, dim], so that whole blocks are gathered as one contiguous run each
    and every head of a block is a contiguous matrix, which is read where it lies.
    """

    def __init__(self, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: mx.Dtype, block_size: int) -> None:
        self._shape = (num_blocks, num_kv_heads, block_size, head_dim)
        rows = num_blocks * num_kv_heads * block_size
        self._keys = mx.zeros((rows, head_dim), dtype)
        self._values = mx.zeros((rows, head_dim), dtype)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self._keys, self._values

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        rows = rows_of_slots(meta, self._shape[1])
        self._keys[rows] = keys
        self._values[rows] = values
        behind = rows_behind(meta, self._shape[1])
        if behind is not None:
            self._keys[behind] = mx.zeros((), keys.dtype)
            self._values[behind] = mx.zeros((), values.dtype)

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        return attend(queries, self._keys.reshape(self._shape), self._values.reshape(self._shape), meta, options)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.write_blocks(targets, *self.read_blocks(sources))

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        index = mx.array(list(ids), dtype=mx.int32)
        keys, values = self._keys.reshape(self._shape)[index], self._values.reshape(self._shape)[index]
        mx.eval(keys, values)  # a read that is still pending would make the next write copy the whole pool
        return keys, values

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        _, num_kv_heads, block_size, head_dim = self._shape
        rows_per_block = num_kv_heads * block_size
        rows = mx.array(list(ids), dtype=mx.int32)[:, None] * rows_per_block + mx.arange(rows_per_block)
        self._keys[rows] = keys.reshape(len(ids), rows_per_block, head_dim)
        self._values[rows] = values.reshape(len(ids), rows_per_block, head_dim)


def rows_of_slots(meta: AttentionMetadata, num_kv_heads: int) -> mx.array:
    """Rows of a [block, kv_head, slot] pool that the step's tokens are written to, [T, num_kv_heads]."""
    key = ("rows", num_kv_heads)
    if key not in meta.derived:
        block, offset = meta.slot_mapping // meta.block_size, meta.slot_mapping % meta.block_size
        heads = mx.arange(num_kv_heads)
        meta.derived[key] = (block[:, None] * num_kv_heads + heads) * meta.block_size + offset[:, None]
    rows: mx.array = meta.derived[key]
    return rows


def rows_behind(meta: AttentionMetadata, num_kv_heads: int) -> mx.array | None:
    """Rows of a [block, kv_head, slot] pool behind the contexts in blocks that begin with this step, if there are any.

    Decoding reads such a block whole. Scores there become minus infinity and weights zero, but neither removes the NaN
    which an earlier owner may have left among the keys or values.
    """
    key = ("behind", num_kv_heads)
    if key not in meta.derived:
        context, query = np.asarray(meta.host_context_lens), np.asarray(meta.host_query_lens)
        last, filled = (context - 1) // meta.block_size, (context - 1) % meta.block_size + 1
        begins = np.flatnonzero((context - query <= last * meta.block_size) & (filled < meta.block_size))
        blocks = meta.host_block_tables[begins, last[begins]]
        slots, heads = np.arange(meta.block_size), np.arange(num_kv_heads)
        rows = (blocks[:, None, None] * num_kv_heads + heads[:, None]) * meta.block_size + slots
        rows = rows[np.broadcast_to(slots >= filled[begins, None, None], rows.shape)]
        meta.derived[key] = mx.array(rows.astype(np.int32)) if rows.size else None
    behind: mx.array | None = meta.derived[key]
    return behind


def attend(
    queries: mx.array, key_blocks: mx.array, value_blocks: mx.array, meta: AttentionMetadata, options: Options
) -> mx.array:
    """[T, Hq, D] -> [T, Hq, D]. Blocks are [num_blocks, Hkv, block_size, D]."""
    num_kv_heads = key_blocks.shape[1]
    key = ("plan", options.window, num_kv_heads)
    if key not in meta.derived:
        meta.derived[key] = make_plan(meta, options.window, num_kv_heads)
    plan: Plan = meta.derived[key]
    outputs = [attend_chunk(queries[chunk.rows], key_blocks, value_blocks, chunk, options) for chunk in plan.chunks]
    if plan.decodes is not None:
        outputs.insert(0, attend_decodes(queries[plan.decodes.rows], key_blocks, value_blocks, plan.decodes, options))
    out = mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    return out if plan.order is None else out[plan.order]


def attend_decodes(
    queries: mx.array, key_blocks: mx.array, value_blocks: mx.array, plan: Decodes, options: Options
) -> mx.array:
    """[n, Hq, D] -> [n, Hq, D]: every part by itself, then the parts of each sequence put together."""
    n, num_heads, dim = queries.shape
    num_kv_heads = key_blocks.shape[1]
    grouped = scaled(queries, options).reshape(n, num_kv_heads, num_heads // num_kv_heads, dim)
    parts = []
    for pairs, on in zip(plan.pairs, contexts(len(plan.pairs)), strict=True):
        with on:
            parts.append(attend_pairs(grouped, key_blocks, value_blocks, pairs, options))
    parts += [attend_shared(grouped[run.members], key_blocks, value_blocks, run, options) for run in plan.shared]
    out, peak, total = join(parts)
    if plan.owner is not None:
        out, peak, total = add_up(out, peak, total, plan.owner, n)
    elif plan.parts is None:
        out, peak, total = (array.reshape(n, -1, *array.shape[1:]) for array in (out, peak, total))
    else:
        out, peak, total = (array[plan.parts] for array in (out, peak, total))
    if plan.padding is not None:
        peak = mx.where(plan.padding, -mx.inf, peak)
    return merge_parts(out, peak, total, options.sinks).astype(queries.dtype).reshape(n, num_heads, dim)


def attend_pairs(
    queries: mx.array, key_blocks: mx.array, value_blocks: mx.array, plan: Pairs, options: Options
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [n, Hkv, group, D]: for each pair the weighted sum of values [P, Hkv, group, D], the highest score and
    the sum of weights, both [P, Hkv, group, 1].

    Blocks are read whole: what is behind a context is zero (`rows_behind`), what is before a window its own sequence's.
    """
    _, num_kv_heads, group, dim = queries.shape
    size = key_blocks.shape[2]
    keys = key_blocks.reshape(-1, size, dim).swapaxes(-1, -2)
    values = value_blocks.reshape(-1, size, dim)
    products = matmul_at(queries.reshape(-1, group, dim), plan.queries, keys, plan.blocks)
    scores = binary_scores(products, options.softcap).reshape(-1, num_kv_heads, group, size)
    weights, peak, total = powers(scores + plan.bias)
    weights = weights.astype(values.dtype).reshape(-1, group, size)
    out = matmul_at(weights, plan.order, values, plan.blocks)
    return out.reshape(-1, num_kv_heads, group, dim), peak, total


def attend_shared(
    queries: mx.array, key_blocks: mx.array, value_blocks: mx.array, run: SharedRun, options: Options
) -> tuple[mx.array, mx.array, mx.array]:
    """As `attend_pairs`, for each of the run's m members: queries [m, Hkv, group, D]."""
    m, num_kv_heads, group, dim = queries.shape
    stacked = queries.swapaxes(0, 1).reshape(num_kv_heads, m * group, dim)
    parts = []
    for heads, on in lanes(num_kv_heads, m * group * num_kv_heads * run.num_keys * SCORE):
        with on:
            keys, values = (contiguous(blocks, run.blocks, heads) for blocks in (key_blocks, value_blocks))
            scores = binary_scores(stacked[heads] @ keys.swapaxes(-1, -2), options.softcap)
            parts.append(weighted_sums(scores[:, None], values))
    out, peak, total = (array.reshape(num_kv_heads, m, group, -1).swapaxes(0, 1) for array in join(parts))
    return out, peak, total


def add_up(
    out: mx.array, peak: mx.array, total: mx.array, owner: mx.array, n: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The parts of each of n owners as one part: [n, 1, Hkv, group, ...]."""
    highest = mx.full((n, *peak.shape[1:]), -mx.inf).at[owner].maximum(peak)
    share = mx.power(2.0, peak - highest[owner])
    total = mx.zeros(highest.shape).at[owner].add(share * total)
    out = mx.zeros((n, *out.shape[1:])).at[owner].add(share * out)
    return out[:, None], highest[:, None], total[:, None]


def merge_parts(out: mx.array, peak: mx.array, total: mx.array, sinks: mx.array | None) -> mx.array:
    """[n, b, Hkv, group, D] and twice [n, b, Hkv, group, 1], of b parts, to the attention [n, Hkv, group, D]."""
    highest = peak.max(axis=1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(1, 1, *peak.shape[2:]) * LOG2E
        highest = mx.maximum(highest, sinks)
    share = mx.power(2.0, peak - highest)
    total = (share * total).sum(axis=1)
    if sinks is not None:
        total = total + mx.power(2.0, sinks - highest)[:, 0]
    return (share * out).sum(axis=1) / total


def matmul_at(left: mx.array, left_at: mx.array, right: mx.array, right_at: mx.array) -> mx.array:
    """The products `left[left_at[i]] @ right[right_at[i]]`. In float32 nothing is copied; MLX's CPU has that for no
    other type."""
    if left.dtype == mx.float32:
        return mx.gather_mm(left, right, lhs_indices=left_at, rhs_indices=right_at)
    return left[left_at] @ right[right_at]


def attend_chunk(
    queries: mx.array, key_blocks: mx.array, value_blocks: mx.array, chunk: PromptChunk, options: Options
) -> mx.array:
    """[L, Hq, D] -> [L, Hq, D], over keys made contiguous."""
    length, num_heads, _ = queries.shape
    num_kv_heads = key_blocks.shape[1]
    group = num_heads // num_kv_heads
    outputs = []
    for heads, on in lanes(num_kv_heads, num_heads * length * chunk.num_keys * SCORE):
        with on:
            keys, values = (
                contiguous(blocks, chunk.blocks, heads)[:, : chunk.num_keys] for blocks in (key_blocks, value_blocks)
            )
            own = slice(heads.start * group, heads.stop * group)
            sinks = None if options.sinks is None else options.sinks[own]
            outputs.append(attend_contiguous(queries[:, own], keys, values, chunk, options._replace(sinks=sinks)))
    return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0]


def contiguous(blocks: mx.array, ids: mx.array, heads: slice) -> mx.array:
    """[num_blocks, Hkv, slot, D] -> [heads, len(ids) * slot, D], a copy."""
    _, num_kv_heads, size, dim = blocks.shape
    places = ids * num_kv_heads + mx.arange(heads.start, heads.stop)[:, None]
    return blocks.reshape(-1, size, dim)[places].reshape(len(places), -1, dim)


def has_fused_attention() -> bool:
    """Whether MLX's own attention is one kernel here. On a CPU it is made of operations that take the whole square of
    scores, masked half included, through exp: twice the time of `attend_tile` for 512 tokens."""
    return mx.default_device() == mx.Device(mx.gpu)


def attend_contiguous(
    queries: mx.array, keys: mx.array, values: mx.array, chunk: PromptChunk, options: Options
) -> mx.array:
    """[L, Hq, D] -> [L, Hq, D], over the chunk's keys and values [Hkv, num_keys, D]."""
    if options.softcap is not None or not has_fused_attention():
        outputs: list[mx.array] = []
        for tile in chunk.tiles:
            some = queries[tile.rows]
            if outputs:  # one after the other: MLX would begin them all, each with memory of its own
                some = mx.depends(some, outputs[-1])
            outputs.append(attend_tile(some, keys[:, tile.keys], values[:, tile.keys], tile.bias, options))
        return mx.concatenate(outputs) if len(outputs) > 1 else outputs[0]
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None],
        keys[None],
        values[None],
        scale=options.scale,
        mask="causal" if chunk.window is None else chunk.visible,
        sinks=None if options.sinks is None else options.sinks.astype(queries.dtype),
    )
    return out[0].swapaxes(0, 1)


def attend_tile(queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array, options: Options) -> mx.array:
    """[L, Hq, D] -> [L, Hq, D], over keys and values [Hkv, n, D]; bias[L, n]."""
    length, num_heads, dim = queries.shape
    num_kv_heads, group = keys.shape[0], num_heads // keys.shape[0]
    grouped = scaled(queries, options).swapaxes(0, 1).reshape(num_kv_heads, group * length, dim)
    scores = binary_scores(grouped @ keys.swapaxes(-1, -2), options.softcap)
    scores = scores.reshape(num_kv_heads, group, length, -1) + bias
    sinks = None if options.sinks is None else options.sinks.astype(mx.float32).reshape(num_kv_heads, group, 1, 1)
    binary_sinks = None if sinks is None else sinks * LOG2E
    out, _, total = weighted_sums(scores, values, binary_sinks)
    return (out / total).astype(queries.dtype).reshape(num_heads, length, dim).swapaxes(0, 1)


def weighted_sums(
    scores: mx.array, values: mx.array, sinks: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Scores [Hkv, group, L, keys] and values [Hkv, keys, D] to weighted sums [Hkv, group * L, D] in float32, with the
    weights' peaks and totals [Hkv, group * L, 1]."""
    weights, peak, total = (part.reshape(part.shape[0], -1, part.shape[-1]) for part in powers(scores, sinks))
    return weighted_sum(weights, total, values), peak, total


def join(parts: Sequence[tuple[mx.array, mx.array, mx.array]]) -> tuple[mx.array, mx.array, mx.array]:
    """Along the first axis, each of the three."""
    if len(parts) == 1:
        return parts[0]
    first, second, third = (mx.concatenate(list(same)) for same in zip(*parts, strict=True))
    return first, second, third


def weighted_sum(weights: mx.array, total: mx.array, values: mx.array) -> mx.array:
    """`weights @ values` in float32; total: of the weights. The product is of the values' type, and the sum over many
    keys may pass what float16 holds, 65,504: there their mean is taken first."""
    if values.dtype == mx.float16:
        return ((weights / total).astype(mx.float16) @ values).astype(mx.float32) * total
    return (weights.astype(values.dtype) @ values).astype(mx.float32)


def scaled(queries: mx.array, options: Options) -> mx.array:
    """What `binary_scores` wants the products of. Half types would lose digits by log2(e)."""
    is_exact = queries.dtype == mx.float32 and options.softcap is None
    return queries * (options.scale * LOG2E if is_exact else options.scale)


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
    weights = mx.power(2.0, scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return weights, peak, total if sinks is None else total + mx.power(2.0, sinks - peak)
