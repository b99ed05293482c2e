"""Tells MLX which rows experts read.

`gather_mm` and `gather_qmm` take an index of a row and one of an expert for each product. mlx-lm gives those of the
experts, and MLX makes the others, 0 to n - 1, in each call, by a kernel. Here they are made once for each number of
rows, and kept.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

KEPT = 64
"""Shapes whose rows are kept. From 64 products on, mlx-lm sorts them by experts, and MLX uses that there are no indices
of rows."""


@functools.lru_cache(KEPT)
def rows_of(shape: tuple[int, ...]) -> mx.array:
    """The indices of vectors in this shape, of that shape."""
    rows = mx.arange(math.prod(shape), dtype=mx.uint32).reshape(shape)
    mx.eval(rows)
    return rows


class ExpertsOfRows(Module):
    """A base class that is put before the class of a layer of experts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x: [..., 1, inputs]. indices: of experts, [..., k]. Returns [..., k, 1, outputs]."""
        if sorted_indices:
            unchanged: mx.array = super().__call__(x, indices, sorted_indices=True)
            return unchanged
        rows = rows_of(x.shape[:-2])
        if "scales" not in self:
            outputs = mx.gather_mm(x, self["weight"].swapaxes(-1, -2), rows, indices)
        else:
            parameters = self["weight"], self["scales"], self.get("biases")
            kind: dict[str, Any] = {name: getattr(self, name) for name in ("group_size", "bits", "mode")}
            outputs = mx.gather_qmm(x, *parameters, rows, indices, transpose=True, **kind)
        return outputs + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else outputs
