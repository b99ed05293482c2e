"""Counts the multiply-adds of what MLX is asked to compute: products with weights, and attention."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxpaged.cpu.small_products import WeightFirstLinear


class MultiplyAdds:
    """total: those since the last `take`. Keys that a mask hides count: they are computed too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = 0

        def linear(function: Any, module: Any, x: mx.array) -> Any:
            self.total += x.size // x.shape[-1] * module.weight.size
            return function(module, x)

        def attention(function: Any, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> Any:
            self.total += q.size * k.shape[2] * 2
            return function(q, k, v, **options)

        for kind in (nn.Linear, WeightFirstLinear):
            monkeypatch.setattr(kind, "__call__", functools.partialmethod(counted, kind.__call__, linear))
        fused = functools.partial(attention, mx.fast.scaled_dot_product_attention)
        monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)

    def take(self) -> int:
        total, self.total = self.total, 0
        return total


def counted(module: Any, function: Any, count: Any, x: mx.array) -> Any:
    return count(function, module, x)
