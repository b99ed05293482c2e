"""Random ragged batches in a pool, and attention over them written out in float64 NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata

Array = npt.NDArray[np.float64]

TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest difference from float64, of outputs whose size is up to about 3; inputs are rounded to the type first."""


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 32
    dtype: mx.Dtype = mx.float32
    value_size: int | None = None
    """head_dim if it is None."""
    latent: bool = False

    @property
    def layout(self) -> KVLayout:
        sizes = (self.num_kv_heads, self.head_dim, self.value_size or self.head_dim)
        return KVLayout(*sizes, self.dtype, self.block_size, self.latent)


@dataclass(frozen=True)
class Extras:
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Of the sequences with images whose tokens see one another."""


def rounded(array: Array, dtype: mx.Dtype) -> Array:
    return np.array(mx.array(array.astype(np.float32)).astype(dtype).astype(mx.float32), dtype=np.float64)


def reference_attention(
    queries: Array, keys: Array, values: Array, scale: float, extras: Extras, sinks: Array | None, sequence: int = 0
) -> Array:
    """Query j of n, [n, Hq, D], sits at position len(keys) - n + j; keys and values are [context, Hkv, size]."""
    n, num_heads, _ = queries.shape
    context, num_kv_heads, _ = keys.shape
    out = np.zeros((n, num_heads, values.shape[-1]))
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = queries[:, head] @ keys[:, kv_head].T * scale
        if extras.softcap is not None:
            scores = extras.softcap * np.tanh(scores / extras.softcap)
        query_at, key_at = np.arange(context - n, context)[:, None], np.arange(context)
        hidden = key_at > query_at
        for start, end in extras.spans.get(sequence, ()):
            hidden &= (query_at < start) | (query_at >= end) | (key_at >= end)
        if extras.window is not None:
            hidden |= key_at <= query_at - extras.window
        if extras.chunk is not None:
            hidden |= key_at // extras.chunk != query_at // extras.chunk
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((n, 1), sinks[head])], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head] = weights[:, :context] @ values[:, kv_head]
    return out


backend = "auto"
"""Of the caches that `make_cache` makes. Tests that run on several backends set it."""


def make_cache(
    num_blocks: int, num_kv_heads: int = 2, head_dim: int = 16, dtype: mx.Dtype = mx.float32, block_size: int = 32
) -> LayerKVCache:
    return LayerKVCache(num_blocks, num_kv_heads, head_dim, dtype, block_size, backend)


def fill_blocks(kv: LayerKVCache, blocks: Sequence[int], number: float = np.nan) -> None:
    """Set all that the blocks hold to one number."""
    kv.write_blocks(blocks, *(mx.full((len(blocks), *plane.shape), number, plane.dtype) for plane in kv.layout.planes))


def write(kv: LayerKVCache, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None:
    """Write keys and values. The keys of a latent layout are its rows, which values are a part of."""
    if kv.layout.latent:
        keys, values = mx.split(keys, [kv.layout.value_size], axis=-1)
    kv.write(keys, values, meta)


def attend(kv: LayerKVCache, queries: mx.array, meta: AttentionMetadata, **options: Any) -> mx.array:
    """Attend with queries of the keys' size, in latent layouts too."""
    if kv.layout.latent:
        queries, q_pe = mx.split(queries, [kv.layout.value_size], axis=-1)
        options["q_pe"] = q_pe * options["scale"]
    return kv.attend(queries, meta, **options)


class Scene:
    """Sequences of (query_len, context_len) in a pool that is NaN wherever no token was written."""

    def __init__(self, shape: Shape, lens: Sequence[tuple[int, int]], seed: int = 0, spare_blocks: int = 2) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.query_lens = [query for query, _ in lens]
        self.context_lens = [context for _, context in lens]
        counts = [-(-context // shape.block_size) for context in self.context_lens]
        ids = self.rng.permutation(sum(counts) + spare_blocks).tolist()
        ends = list(itertools.accumulate(counts))
        self.tables = [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
        self.spare = ids[ends[-1] :]
        self.kv = LayerKVCache.from_layout(len(ids), shape.layout, backend)
        fill_blocks(self.kv, range(len(ids)))
        kv_heads, size = shape.num_kv_heads, shape.layout.value_size
        self.keys = [self.random(context, kv_heads, shape.head_dim) for context in self.context_lens]
        if shape.latent:
            self.values = [keys[..., :size] for keys in self.keys]
        else:
            self.values = [self.random(context, kv_heads, size) for context in self.context_lens]
        self.queries = [self.random(query, shape.num_heads, shape.head_dim) for query in self.query_lens]
        self.scale = shape.head_dim**-0.5
        self.sinks = rounded(self.rng.normal(size=shape.num_heads), shape.dtype)
        self.write_all()

    def random(self, length: int, heads: int, size: int) -> Array:
        return rounded(self.rng.normal(size=(length, heads, size)), self.shape.dtype)

    def array(self, parts: Sequence[Array]) -> mx.array:
        return mx.array(np.concatenate(parts).astype(np.float32)).astype(self.shape.dtype)

    def write_all(self) -> None:
        """Earlier tokens in a step of their own, then the step's query tokens, as the engine does."""
        earlier = [context - query for query, context in zip(self.query_lens, self.context_lens, strict=True)]
        some = [i for i, length in enumerate(earlier) if length]
        if some:
            lens = [earlier[i] for i in some]
            meta = AttentionMetadata.build(lens, lens, [self.tables[i] for i in some], self.shape.block_size)
            keys, values = (self.array([part[i][: earlier[i]] for i in some]) for part in (self.keys, self.values))
            write(self.kv, keys, values, meta)
        parts = ([part[i][start:] for i, start in enumerate(earlier)] for part in (self.keys, self.values))
        keys, values = map(self.array, parts)
        write(self.kv, keys, values, self.meta())

    def meta(self, spans: dict[int, list[tuple[int, int]]] | None = None) -> AttentionMetadata:
        lens = self.query_lens, self.context_lens
        return AttentionMetadata.build(*lens, self.tables, self.shape.block_size, spans)

    def attend(self, extras: Extras = Extras(), meta: AttentionMetadata | None = None) -> Array:
        out = attend(
            self.kv,
            self.array(self.queries),
            meta or self.meta(extras.spans),
            scale=self.scale,
            window=extras.window,
            chunk=extras.chunk,
            mutual=bool(extras.spans),
            softcap=extras.softcap,
            sinks=mx.array(self.sinks.astype(np.float32)).astype(self.shape.dtype) if extras.sinks else None,
        )
        assert out.shape == (sum(self.query_lens), self.shape.num_heads, self.shape.layout.value_size)
        assert out.dtype == self.shape.dtype
        return np.array(out.astype(mx.float32), dtype=np.float64)

    def expected(self, extras: Extras = Extras()) -> Array:
        sinks = self.sinks if extras.sinks else None
        parts = zip(self.queries, self.keys, self.values, strict=True)
        return np.concatenate(
            [reference_attention(*rows, self.scale, extras, sinks, i) for i, rows in enumerate(parts)]
        )

    def check(self, extras: Extras = Extras()) -> None:
        difference = np.abs(self.attend(extras) - self.expected(extras)).max()
        assert difference < TOLERANCE[self.shape.dtype]  # False for NaN too


RAGGED = [(1, 1), (1, 33), (5, 5), (1, 64), (40, 71), (1, 97), (2, 34), (1, 32), (1, 200), (33, 33)]
"""Decoding sequences and chunks, fresh and continued, with contexts on both sides of block borders."""


def share(scene: Scene, sequence: int, other: int, blocks: int) -> None:
    """Make a sequence begin with the blocks of an earlier one."""
    tokens = blocks * scene.shape.block_size
    assert tokens < min(scene.context_lens[sequence], scene.context_lens[other])
    scene.tables[sequence][:blocks] = scene.tables[other][:blocks]
    for rows in (scene.keys, scene.values):
        rows[sequence][:tokens] = rows[other][:tokens]
