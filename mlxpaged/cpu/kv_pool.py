"""The KV pool of the "cpu" backend: the same interface as MetalPool (mlxpaged/attention/pool.py), in MLX operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxpaged.cpu.attention import KV, attend
from mlxpaged.cpu.attention_plan import make_plan

if TYPE_CHECKING:
    from mlxpaged.attention.layout import KVLayout
    from mlxpaged.attention.metadata import AttentionMetadata
    from mlxpaged.attention.pool import Options


class CpuPool:
    """Keys and values are laid out as `KV` says."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        self._num_kv_heads = layout.num_kv_heads
        matrices = num_blocks * layout.num_kv_heads
        self._keys = mx.zeros((matrices, layout.block_size, layout.key_size), layout.dtype)
        self._values = (
            None if layout.latent else mx.zeros((matrices, layout.block_size, layout.value_size), layout.dtype)
        )
        self._value_size = layout.value_size

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self._keys,) if self._values is None else (self._keys, self._values)

    def write(self, keys: mx.array, values: mx.array | None, meta: AttentionMetadata) -> None:
        slots, unused = slot_indices(meta, self._num_kv_heads)
        self._keys[slots] = keys
        if self._values is not None and values is not None:
            self._values[slots] = values
        if unused is not None:
            self._keys[unused] = 0.0
            if self._values is not None:
                self._values[unused] = 0.0

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array:
        heads = queries.shape[1], self._num_kv_heads
        key = ("plan", options.locality, heads)
        if key not in meta.derived:
            meta.derived[key] = make_plan(meta, options.locality, *heads)
        values = self._keys if self._values is None else self._values
        kv = KV(self._keys, values, self._num_kv_heads, self._value_size)
        return attend(queries, kv, meta.derived[key], options)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.write_blocks(targets, *self.read_blocks(sources))

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        matrices = self._matrices_of(ids)
        keys = self._keys[matrices]
        values = keys[..., :0] if self._values is None else self._values[matrices]
        mx.eval(keys, values)  # if a read were still pending, the next write would copy the whole pool
        return keys, values

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None:
        matrices = self._matrices_of(ids)
        self._keys[matrices] = keys
        if self._values is not None:
            self._values[matrices] = values

    def _matrices_of(self, ids: Sequence[int]) -> mx.array:
        """[block, kv_head]"""
        return mx.array(list(ids), dtype=mx.int32)[:, None] * self._num_kv_heads + mx.arange(self._num_kv_heads)


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
        context, query = np.asarray(meta.host_context_lens), np.asarray(meta.host_query_lens)
        last, filled = (context - 1) // size, (context - 1) % size + 1
        begins = np.flatnonzero((context - query <= last * size) & (filled < size))
        which, tail = np.nonzero(np.arange(size) >= filled[begins, None])
        blocks = meta.host_block_tables[begins, last[begins]][which]
        tail_matrices = blocks[:, None] * num_kv_heads + np.arange(num_kv_heads)
        both = np.stack((tail_matrices, np.broadcast_to(tail[:, None], tail_matrices.shape))).reshape(2, -1)
        meta.derived[key] = slots, tuple(mx.array(both.astype(np.int32))) if len(begins) else None
    indices: tuple[Indices, Indices | None] = meta.derived[key]
    return indices
