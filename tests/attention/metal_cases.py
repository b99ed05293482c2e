"""A random ragged batch on the Metal backend, and what attention over it is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.quantization import Quantization
from mlxpaged.attention.tuning import Choice, Tuning
from tests.attention.scenes import attend, write

Array = npt.NDArray[np.float64]

TOLERANCE = {mx.float32: 4e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Largest difference from float64, absolute, for outputs up to about 3. Half types: the rounding of the output (2^-11
and 2^-8 of it) and no more, because everything before it is float32."""

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
"""Sizes that models have. The kernels take any multiple of four up to a limit."""

SPARE = 3
"""Blocks of the pool that no sequence owns; they hold NaN."""


@dataclass
class Case:
    """Sequences as (query_len, context_len). All slots that no sequence owns are NaN: other blocks, and slots after a
    context. Blocks are handed out in random order.

    decode_partition, chunk_partition: keys in one work item, None for the backend's own. tuning: instead of these.
    sharpness: factor on the queries; in the hundreds, only a running maximum keeps the softmax finite. value_size:
    head_dim if it is None. latent: values are the first value_size elements of the keys. spans: of the sequences with
    images whose tokens see one another.
    """

    lens: Sequence[tuple[int, int]]
    dtype: mx.Dtype = mx.float32
    head_dim: int = 64
    block_size: int = 32
    kv_heads: int = 2
    group: int = 2
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    decode_partition: int | None = None
    chunk_partition: int | None = None
    tuning: Tuning | None = None
    sharpness: float = 1.0
    seed: int = 0
    value_size: int | None = None
    latent: bool = False
    chunk: int | None = None
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    quantization: Quantization | None = None
    kv: LayerKVCache = field(init=False)
    meta: AttentionMetadata = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        needed = [-(-context // self.block_size) for _, context in self.lens]
        blocks = sum(needed) + SPARE
        order = rng.permutation(blocks).tolist()
        self.tables: list[list[int]] = []
        for count in needed:
            self.tables.append([order.pop() for _ in range(count)])
        lens = [query for query, _ in self.lens], [context for _, context in self.lens]
        self.meta = AttentionMetadata.build(*lens, self.tables, self.block_size, self.spans)
        size = self.value_size or self.head_dim
        sizes = self.kv_heads, self.head_dim, size
        self.layout = KVLayout(*sizes, self.dtype, self.block_size, self.latent, self.quantization)
        self.queries, self.keys, self.values = [], [], []
        for query, context in self.lens:
            heads = self.kv_heads * self.group
            self.queries.append(self.rounded(rng.standard_normal((query, heads, self.head_dim)) * self.sharpness))
            self.keys.append(self.rounded(rng.standard_normal((context, self.kv_heads, self.head_dim))))
            self.values.append(
                self.keys[-1][..., :size]
                if self.latent
                else self.rounded(rng.standard_normal((context, self.kv_heads, size)))
            )
        self.sinks = rng.standard_normal(self.kv_heads * self.group).astype(np.float32)
        self.scale = self.head_dim**-0.5
        decode, chunks = (size and Choice(size) for size in (self.decode_partition, self.chunk_partition))
        tuning = self.tuning or Tuning(decode=decode, chunks=chunks)
        self.kv = LayerKVCache.from_layout(blocks, self.layout, backend="metal", tuning=tuning)
        self.fill(blocks)

    def fill(self, blocks: int) -> None:
        """Earlier tokens go in block by block, the step's own through `write`."""
        if self.quantization is not None:
            self.fill_quantized(blocks)
            return
        pools = [np.full((blocks, *plane.shape), np.nan) for plane in self.layout.planes]
        for i, (query, context) in enumerate(self.lens):
            for pool, rows in zip(pools, (self.keys[i], self.values[i]), strict=False):
                at = np.arange(context - query)
                of_block = np.asarray(self.tables[i])[at // self.block_size]
                pool[of_block, :, at % self.block_size] = rows[at]
        self.kv.write_blocks(range(blocks), *(self.array(pool) for pool in pools))
        self.write()
        mx.eval(self.kv.arrays)

    def fill_quantized(self, blocks: int) -> None:
        """Earlier tokens go in through `write`. The bits of all other slots are ones: their scales are NaN."""
        ones = [mx.full((blocks, plane.nbytes), 255, mx.uint8) for plane in self.layout.planes]
        shapes = [(blocks, *plane.shape) for plane in self.layout.planes]
        planes = [bits.view(self.dtype).reshape(shape) for bits, shape in zip(ones, shapes, strict=True)]
        self.kv.write_blocks(range(blocks), *planes)
        rows = zip(self.tables, self.keys, self.values, self.lens, strict=True)
        for table, keys, values, (query, context) in rows:
            if earlier := context - query:
                meta = AttentionMetadata.build([earlier], [earlier], [table], self.block_size)
                self.kv.write(self.array(keys[:earlier]), self.array(values[:earlier]), meta)
        self.write()
        mx.eval(self.kv.arrays)

    def stored(self, i: int) -> tuple[Array, Array]:
        """The keys and values of a sequence that the cache stands for."""
        if (kind := self.quantization) is None:
            return self.keys[i], self.values[i]
        *packed, scales = kind.quantize(self.array(self.keys[i]), self.array(self.values[i]))
        bits = [part.view(mx.uint32).view(mx.float32) for part in packed]
        keys, values = kind.dequantize([*bits, scales.astype(mx.float32)])
        return np.array(keys).astype(np.float64), np.array(values).astype(np.float64)

    def write(self) -> None:
        """The step's own keys and values."""
        write(self.kv, self.of_step(self.keys), self.of_step(self.values), self.meta)

    def of_step(self, rows: Sequence[Array]) -> mx.array:
        return self.array(np.concatenate([part[-query:] for part, (query, _) in zip(rows, self.lens, strict=True)]))

    def array(self, numbers: Array) -> mx.array:
        return mx.array(numbers.astype(np.float32)).astype(self.dtype)

    def rounded(self, numbers: Array) -> Array:
        return np.array(self.array(numbers).astype(mx.float32)).astype(np.float64)

    @property
    def options(self) -> dict[str, Any]:
        sinks = mx.array(self.sinks) if self.has_sinks else None
        local = {"window": self.window, "chunk": self.chunk, "mutual": bool(self.spans)}
        return {"scale": self.scale, "softcap": self.softcap, "sinks": sinks, **local}

    def attend(self) -> Array:
        out = attend(self.kv, self.array(np.concatenate(self.queries)), self.meta, **self.options)
        assert out.dtype == self.dtype
        return np.array(out.astype(mx.float32)).astype(np.float64)

    def expected(self) -> Array:
        return np.concatenate([self._expected(i) for i in range(len(self.lens))])

    def _expected(self, i: int) -> Array:
        query_len, context = self.lens[i]
        at = np.arange(context - query_len, context)[:, None, None, None]
        key_at = np.arange(context)
        queries = self.queries[i].reshape(query_len, self.kv_heads, self.group, self.head_dim)
        keys, values = self.stored(i)
        scores = np.einsum("qhgd,khd->qhgk", queries, keys) * self.scale
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        visible = key_at <= at
        for start, end in self.spans.get(i, ()):
            visible |= (at >= start) & (at < end) & (key_at < end)
        if self.window is not None:
            visible &= key_at > at - self.window
        if self.chunk is not None:
            visible &= key_at // self.chunk == at // self.chunk
        scores = np.where(visible, scores, -np.inf)
        sinks = np.full(self.kv_heads * self.group, -np.inf) if not self.has_sinks else self.sinks.astype(np.float64)
        sinks = sinks.reshape(1, self.kv_heads, self.group, 1)
        maximum = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
        weights = np.exp(scores - maximum)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - maximum)
        out = np.einsum("qhgk,khd->qhgd", weights, values)
        return out.reshape(query_len, self.kv_heads * self.group, -1)

    def error(self) -> float:
        """Largest difference from float64; inf where there is NaN."""
        difference = np.abs(self.attend() - self.expected())
        return float(difference.max()) if np.isfinite(difference).all() else float("inf")

    def check(self) -> None:
        error = self.error()
        assert error <= TOLERANCE[self.dtype], f"{error:.2e}: {self}"

    @property
    def elements(self) -> int:
        """Key elements that the batch attends to, each counted once; as many of values."""
        visible = (min(context, context if self.window is None else self.window + q - 1) for q, context in self.lens)
        return sum(visible) * self.kv_heads * self.head_dim
