"""The KV pool of the "cpu" backend: the same interface as MetalPool (mlxpaged/attention/pool.py), in MLX operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Memory, Options
from mlxpaged.cpu.attention import KV, attend, contiguous
from mlxpaged.cpu.attention_plan import make_plan


class CpuPool:
    """Keys and values are laid out as `KV` says."""

    def __init__(self, layout: KVLayout, memory: Memory) -> None:
        self._layout, self._num_kv_heads = layout, layout.num_kv_heads
        self._shapes = [(-1, *plane.shape[1:]) for plane in layout.planes]
        self._memory = memory

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
        slots, unused = slot_indices(meta, self._num_kv_heads)
        if unused is not None:  # first: drafts of the step may be written into some of them
            self._memory.write(self._shapes, unused, [0.0] * len(self._shapes))
        self._memory.write(self._shapes, slots, self._layout.rows(keys, values))

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        heads = queries.shape[1], self._num_kv_heads
        key = ("plan", options.locality, heads)
        if key not in meta.derived:
            meta.derived[key] = make_plan(meta, options.locality, *heads)
        planes = self._memory.seen_as(self._shapes)
        kv = KV(planes[0], planes[-1], self._num_kv_heads, self._layout.value_size)
        return self._memory.has_read(attend(options.whole(queries), kv, meta.derived[key], options))

    def read_context(self, meta: AttentionMetadata) -> mx.array:
        [num_keys] = meta.step.context_lens
        blocks = meta.host_block_tables[0, : -(-num_keys // meta.block_size)]
        matrices = mx.array(blocks) * self._num_kv_heads + mx.arange(self._num_kv_heads)[:, None]
        return self._memory.has_read(contiguous(self._memory.seen_as(self._shapes)[0], matrices)[:, :num_keys])


Indices = tuple[mx.array, mx.array]
"""Matrix and slot."""


def slot_indices(meta: AttentionMetadata, num_kv_heads: int) -> tuple[Indices, Indices | None]:
    """The slots that the step's tokens are written to, [T, num_kv_heads] each, and the unused tail slots, [n] each, of
    blocks that begin with this step; None if there are none.

    Decoding reads such a block whole. Unused slots get scores of minus infinity and weights of zero, but neither
    removes a NaN that an earlier owner of the block left there, so they are zeroed.
    """
    key = ("slots", num_kv_heads)
    if key not in meta.derived:
        size = meta.block_size
        matrices = (meta.slot_mapping // size)[:, None] * num_kv_heads + mx.arange(num_kv_heads)
        slots = matrices, mx.broadcast_to((meta.slot_mapping % size)[:, None], matrices.shape)
        context, query = np.asarray(meta.step.context_lens), np.asarray(meta.step.query_lens)
        last, filled = (context - 1) // size, (context - 1) % size + 1
        begins = np.flatnonzero((context - query <= last * size) & (filled < size))
        which, tail = np.nonzero(np.arange(size) >= filled[begins, None])
        blocks = meta.host_block_tables[begins, last[begins]][which]
        tail_matrices = blocks[:, None] * num_kv_heads + np.arange(num_kv_heads)
        both = np.stack((tail_matrices, np.broadcast_to(tail[:, None], tail_matrices.shape))).reshape(2, -1)
        meta.derived[key] = slots, tuple(mx.array(both.astype(np.int32))) if len(begins) else None
    indices: tuple[Indices, Indices | None] = meta.derived[key]
    return indices
