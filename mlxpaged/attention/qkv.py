"""How a layer makes queries, keys and values of a row of its joined projections: heads are normalized, then rotated.

`split` does it with MLX's operations. On the Metal backend, one kernel does it and writes keys and values too
(metal_kernels/qkv_write.metal).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.attention.layout import KVLayout

Rotation = Callable[[mx.array, mx.array], mx.array]
"""A rotary embedding: [T, heads, 1, D] and positions [T] -> [T, heads, 1, D]"""


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm over a head. weight: [D]"""

    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, eq=False)
class Rope:
    """The arguments of `mx.fast.rope`. factor: elements are multiplied by it before they are rotated."""

    dims: int
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: mx.array | None = None
    factor: float = 1.0

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        if self.factor != 1.0:
            x = x.at[..., : self.dims].multiply(self.factor)
        options: dict[str, Any] = {"base": self.base, "scale": self.scale, "freqs": self.freqs}
        return mx.fast.rope(x, self.dims, traditional=self.traditional, offset=positions, **options)


class QkvKind(NamedTuple):
    """What the variant of the kernel depends on in addition to the layout. rotated: the first elements of a head that
    are rotated. traditional, frequencies: whether Rope has these. norms: whether heads are normalized. gated: as in
    Qkv."""

    num_query_heads: int
    rotated: int = 0
    traditional: bool = False
    frequencies: bool = False
    norms: bool = False
    gated: bool = False

    def __str__(self) -> str:
        how = "neighbours" * self.traditional or "halves"
        rope = f"rope of {self.rotated} by {how}{' and frequencies' * self.frequencies}" if self.rotated else "no rope"
        return f"{self.num_query_heads} query heads, {rope}{', normalized' * self.norms}{', gated' * self.gated}"


@dataclass(frozen=True)
class QkvShape:
    """All that the variant of the kernel depends on."""

    layout: KVLayout
    kind: QkvKind

    def __str__(self) -> str:
        layout, dtype = self.layout, str(self.layout.dtype).removeprefix("mlx.core.")
        sizes = f"{layout.key_size}" + f"/{layout.value_size}" * (layout.value_size != layout.key_size)
        quantized = f", {layout.quantization}" * (layout.quantization is not None)
        heads = f"{self.kind}, {layout.num_kv_heads} KV heads of {sizes}"
        return f"{heads}, {dtype}, blocks of {layout.block_size}{quantized}"


@dataclass(frozen=True, eq=False)
class Qkv:
    """A row is [queries | keys | values], each by heads. norms: of queries and keys. own_rope: what `split` calls in
    place of `rope`, which does the same: on a CPU, the model's own takes its cosines from tables. gated: each head of
    queries is followed by a gate of its output, of the same size (Qwen3-Next)."""

    num_query_heads: int
    norms: tuple[Norm, Norm] | None
    rope: Rope | None
    own_rope: Rotation | None = None
    gated: bool = False

    @functools.cached_property
    def kind(self) -> QkvKind:
        rope = self.rope or Rope(0)
        rotation = rope.dims, rope.traditional, rope.freqs is not None
        return QkvKind(self.num_query_heads, *rotation, self.norms is not None, self.gated)

    @functools.cached_property
    def settings(self) -> mx.array:
        """For the kernel: the norms' epsilons, log2 of the base, the factors on positions and on elements."""
        epsilons = [0.0, 0.0] if self.norms is None else [norm.eps for norm in self.norms]
        rope = self.rope or Rope(0)
        return mx.array([*epsilons, math.log2(rope.base or 1.0), rope.scale, rope.factor], mx.float32)

    def split(self, rows: mx.array, layout: KVLayout, positions: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[T, row] -> queries, keys and values [T, heads, 1, size]."""
        heads, kv_heads, size = self.num_query_heads, layout.num_kv_heads, layout.key_size
        rotate = self.rope if self.own_rope is None else self.own_rope  # a module without arrays is false
        if rotate is not None and self.norms is None and not self.gated:  # queries and keys at once
            both, values = mx.split(rows, [(heads + kv_heads) * size], axis=-1)
            rotated = rotate(both.reshape(len(rows), -1, 1, size), positions)
            queries, keys = mx.split(rotated, [heads], axis=1)
            return queries, keys, values.reshape(len(rows), kv_heads, 1, -1)
        ends = [heads * size * (1 + self.gated), (heads * (1 + self.gated) + kv_heads) * size]
        parts = zip(mx.split(rows, ends, axis=-1), (heads, kv_heads, kv_heads), strict=True)
        queries, keys, values = (part.reshape(len(rows), number, 1, -1) for part, number in parts)
        if self.gated:
            queries = queries[..., :size]
        if self.norms is not None:
            queries, keys = (norm(x) for norm, x in zip(self.norms, (queries, keys), strict=True))
        if rotate is not None:
            queries, keys = rotate(queries, positions), rotate(keys, positions)
        return queries, keys, values

    def gate(self, heads: mx.array, rows: mx.array) -> mx.array:
        """Multiply what attention has returned, [T, heads, 1, size], by the sigmoids of its gates."""
        count, size = self.num_query_heads, heads.shape[-1]
        gates = rows[:, : 2 * count * size].reshape(len(rows), count, 1, -1)[..., size:]
        return heads * mx.sigmoid(gates)


def row_size(layout: KVLayout, num_query_heads: int, gated: bool = False) -> int:
    """Elements of a row."""
    queries = num_query_heads * layout.key_size * (1 + gated)
    return queries + layout.num_kv_heads * (layout.key_size + layout.value_size)
