"""What makes a model's own operations faster on MLX's CPU, where they are not what they are on a GPU.

- The gated activation of most models: MLX's CPU takes 14 ns for an element of a sigmoid, one at a time and on one core,
  and 4 for a power; in an 80-million model on two cores that was a quarter of a step.
  It is shared out among the cores (mlxpaged/attention/lanes.py).
- Rope: rope_tables.py.
- The layout of weights: a product with one row reads a matrix stored [in, out] in three quarters of the time.
- The number of rows: OpenBLAS works in tiles of 16 and takes longer for a part of one than for a whole: 76 rows take
  1.4 times what 80 do, 12 twice what 16 do.

A GPU has none of these, so nothing is changed there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx_lm.models import activations

from mlxpaged import blas
from mlxpaged.attention.lanes import lanes
from mlxpaged.models.rope_tables import turn_by_tables

swiglu_of_mlx_lm: Callable[[mx.array, mx.array], mx.array] = activations.swiglu

ROW_TILE = 16
"""Rows that OpenBLAS computes together: its kernel's 4, 8 or 16, for each of two to four threads."""
LEAST_ROWS = 4
"""Fewer cost less than a tile."""


class TiledLinear(Linear):
    """A linear layer that computes whole tiles of rows: [..., in] -> [..., out], filled up with zeros in between."""

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        missing = -rows % ROW_TILE
        if rows < LEAST_ROWS or missing == 0:
            return super().__call__(x)
        filled = mx.concatenate([x.reshape(rows, -1), mx.zeros((missing, x.shape[-1]), x.dtype)])
        return super().__call__(filled)[:rows].reshape(*x.shape[:-1], -1)


def suit_cpu(model: Module) -> None:
    """On a CPU, give the model the activation and the ropes that are fastest there; with OpenBLAS the linear layers."""
    if mx.default_device() != mx.Device(mx.cpu):
        return
    route_activation(model)
    turn_by_tables(model)
    if blas.loaded is not None:
        suit_linear_layers(model)


def suit_linear_layers(model: Module) -> None:
    """Store the float32 weights of linear layers as [in, out], their shape stays [out, in]; compute whole tiles."""
    for module in model.modules():
        if type(module) is Linear and module.weight.dtype == mx.float32:
            module.weight = mx.contiguous(module.weight.T).T
            mx.eval(module.weight)  # one by one, so that no second model is in memory
            module.__class__ = TiledLinear


def route_activation(model: Module) -> None:
    """Let every module that defines a layer of `model` compute mlx-lm's `swiglu` by powers.

    Models call a module-level function, as they do for attention: other models of the same module get it too. A
    function of the model's own by that name is another one.
    """
    for name in {type(module).__module__ for module in model.modules()} & sys.modules.keys():
        module: Any = sys.modules[name]
        if getattr(module, "swiglu", None) is swiglu_of_mlx_lm:
            module.swiglu = swiglu_by_powers


def swiglu_by_powers(gate: mx.array, x: mx.array) -> mx.array:
    """`gate * sigmoid(gate) * x`, of float32 by powers of two; half types as mlx-lm does."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32:
        return swiglu_of_mlx_lm(gate, x)
    shares = lanes(gate.shape[0], gate.size)
    if len(shares) == 1:
        return gated(gate, x)
    gate = mx.depends(gate, x)  # a product beside the lanes would take their cores
    parts = []
    for rows, on in shares:
        with on:
            parts.append(gated(gate[rows], x[rows]))
    return mx.concatenate(parts)


def gated(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (1 + mx.power(2.0, gate * -math.log2(math.e))) * x
