"""A step of a fused layer, and what it computes and stores in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, HostStep, step_of
from mlxpaged.attention.qkv import Norm, Qkv, Rope, row_size
from tests.attention.scenes import fill_blocks

Array = npt.NDArray[np.float64]

TOLERANCE = {mx.float32: 3e-5, mx.float16: 6e-3, mx.bfloat16: 5e-2}
"""Largest difference from float64 for results up to about 5. Half types are rounded by each of three operations. Angles
of up to 300 are rounded in float32."""

SMALL = {"layout": KVLayout(2, 32, 32, mx.float32, 8), "heads": 4}

KINDS: dict[str, dict[str, Any]] = {
    "Llama 3.1": SMALL | {"freqs": True},
    "Qwen 3": SMALL | {"layout": KVLayout(2, 128, 128, mx.float32, 16), "norms": True},
    "neighbours": SMALL | {"traditional": True},
    "a part": SMALL | {"rotated": 12, "norms": True, "traditional": True},
    "the first half of a part": SMALL | {"rotated": 24, "scale": 0.25},
    "a factor": SMALL | {"freqs": True, "factor": 0.8, "norms": True},
    "no rope": SMALL | {"rotated": 0, "norms": True},
    "neither": SMALL | {"rotated": 0},
    "values of another size": {"layout": KVLayout(3, 48, 20, mx.float32, 8), "heads": 3, "norms": True},
    "heads of 256": {"layout": KVLayout(1, 256, 256, mx.float32, 32), "heads": 2, "norms": True},
    "gates": SMALL | {"rotated": 8, "norms": True, "gated": True},
    "heads of 80": {"layout": KVLayout(1, 80, 80, mx.float32, 32), "heads": 9},
    "tiny heads": {"layout": KVLayout(1, 4, 4, mx.float32, 32), "heads": 1, "freqs": True, "norms": True},
}


class QkvCase:
    """Tokens of two sequences, whose blocks alternate with blocks of others. Rows are uniform from -2 to 2."""

    def __init__(
        self,
        layout: KVLayout,
        heads: int,
        rotated: int | None = None,
        traditional: bool = False,
        freqs: bool = False,
        norms: bool = False,
        scale: float = 1.0,
        factor: float = 1.0,
        gated: bool = False,
        lens: tuple[tuple[int, int], ...] = ((5, 5), (4, 300)),
    ) -> None:
        rng = np.random.default_rng(0)
        self.layout, self.heads = layout, heads
        size = layout.key_size
        self.rotated = size if rotated is None else rotated
        self.weights = self.array(rng.uniform(0.5, 1.5, (2, size)))
        self.freqs = mx.array(np.exp(rng.uniform(0, 9, self.rotated // 2)).astype(np.float32))
        self.rope = Rope(
            self.rotated, traditional, None if freqs else 1e4, scale, self.freqs if freqs else None, factor
        )
        self.epsilons = (0.05, 0.5)
        pair = [Norm(weight, eps) for weight, eps in zip(self.weights, self.epsilons, strict=True)]
        both = (pair[0], pair[1]) if norms else None
        self.qkv = Qkv(heads, both, self.rope if self.rotated else None, gated=gated)
        self.lens = lens
        block = layout.block_size
        counts = [-(-context // block) for _, context in lens]
        first = np.cumsum([0, *counts])
        self.tables = [[2 * (at + i) + 1 for i in range(count)][::-1] for at, count in zip(first, counts, strict=False)]
        self.blocks = 2 * int(first[-1]) + 1
        self.meta = AttentionMetadata.build([n for n, _ in lens], [n for _, n in lens], self.tables, block)
        tokens = self.meta.num_tokens
        self.positions = np.concatenate([np.arange(context - n, context) for n, context in lens])
        self.rows = self.array(rng.uniform(-2, 2, (tokens, row_size(layout, heads, gated))))

    def repeat_last(self) -> None:
        """Add the last token, of one in each sequence, once more, as in a tile of a batch-invariant engine."""
        table = np.full((1, len(self.lens) + 1, max(map(len, self.tables))), -1, np.int32)
        for row, blocks in zip(table[0], [*self.tables, self.tables[-1]], strict=True):
            row[: len(blocks)] = blocks
        contexts = [context for _, context in (*self.lens, self.lens[-1])]
        step = HostStep.build(
            replace(step_of([1] * len(contexts), contexts, table), num_repeats=1), self.layout.block_size
        )
        [self.meta], _ = step.on_device(step.upload())
        self.rows = mx.concatenate([self.rows, self.rows[-1:]])

    def array(self, numbers: Array) -> mx.array:
        return mx.array(numbers.astype(np.float32)).astype(self.layout.dtype)

    def run(self, backend: str) -> tuple[Array, Array, Array]:
        """The queries, and keys and values of all blocks. What nothing writes is 7."""
        layout = self.layout
        kv = LayerKVCache.from_layout(self.blocks, layout, backend)
        fill_blocks(kv, range(self.blocks), 7)
        queries = kv.write_rows(self.rows, self.qkv, self.meta)
        results = [queries, *kv.read_blocks(range(self.blocks))]
        assert {each.dtype for each in results} == {layout.dtype}
        assert queries.shape == (self.meta.num_tokens, self.heads, layout.key_size)
        first, second, third = (np.array(each.astype(mx.float32)).astype(np.float64) for each in results)
        return first, second, third

    def round(self, numbers: Array) -> Array:
        """To the layout's type."""
        return np.array(self.array(numbers).astype(mx.float32)).astype(np.float64)

    def expected(self, round: Callable[[Array], Array] = lambda x: x) -> tuple[Array, Array, Array]:
        """The same in float64. round: the result of each operation that is a kernel of its own in MLX."""
        layout, rows = self.layout, np.array(self.rows.astype(mx.float32)).astype(np.float64)
        sizes = (layout.key_size * (1 + self.qkv.gated), layout.key_size, layout.value_size)
        ends = np.cumsum([self.heads * sizes[0], layout.num_kv_heads * sizes[1]])
        queries, keys, values = (
            part.reshape(len(rows), -1, size) for part, size in zip(np.split(rows, ends, axis=1), sizes, strict=True)
        )
        queries = queries[..., : layout.key_size]
        if self.qkv.norms is not None:
            weights = np.array(self.weights.astype(mx.float32)).astype(np.float64)
            queries, keys = (
                round(weight * round(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)))
                for x, weight, eps in zip((queries, keys), weights, self.epsilons, strict=True)
            )
        queries, keys = (round(self.rotate(x, round)) for x in (queries, keys))
        pools = [
            np.full((self.blocks, layout.num_kv_heads, layout.block_size, size), 7.0)
            for size in (layout.key_size, layout.value_size)
        ]
        owners = np.repeat(range(len(self.lens)), [n for n, _ in self.lens])
        for token, (owner, position) in enumerate(zip(owners, self.positions, strict=True)):
            block, slot = divmod(int(position), layout.block_size)
            for pool, x in zip(pools, (keys, values), strict=True):
                pool[self.tables[owner][block], :, slot] = x[token]
        return queries, pools[0], pools[1]

    def rotate(self, x: Array, round: Callable[[Array], Array]) -> Array:
        half, rope = self.rotated // 2, self.rope
        if not half:
            return x
        own = np.array(self.freqs).astype(np.float64)
        inverse = 1 / own if rope.freqs is not None else 1e4 ** (-np.arange(half) / half)
        turn = np.exp(1j * rope.scale * self.positions[:, None, None] * inverse)
        first, second = (
            (slice(0, self.rotated, 2), slice(1, self.rotated, 2))
            if rope.traditional
            else (slice(0, half), slice(half, self.rotated))
        )
        factor = round(np.array(rope.factor))
        turned = (round(factor * x[..., first]) + 1j * round(factor * x[..., second])) * turn
        out = x.copy()
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def error(self, backend: str) -> float:
        """Of what is written. The "cpu" backend makes further slots zero."""
        results = zip(self.run(backend), self.expected(), strict=True)
        return max(
            float(np.abs(got - expected)[(expected != 7) | (backend != "cpu")].max()) for got, expected in results
        )

    def is_right(self, backend: str = "metal") -> bool:
        return self.error(backend) <= TOLERANCE[self.layout.dtype]


def retyped(dtype: mx.Dtype, options: dict[str, Any]) -> dict[str, Any]:
    layout = options["layout"]
    sizes = (layout.num_kv_heads, layout.key_size, layout.value_size, dtype, layout.block_size)
    return options | {"layout": KVLayout(*sizes)}
