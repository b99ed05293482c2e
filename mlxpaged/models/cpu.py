"""What makes a model's own operations faster on MLX's CPU, where they are not what they are on a GPU.

- Linear layers, of any type: the outputs of each are shared out among the cores (laned.py). Those to queries, keys and
  values are one layer (joined.py).
- The gated activation of most models: MLX's CPU takes 14 ns for an element of a sigmoid and 6 for a power, on one core.
  In an 80-million model on two cores that was a quarter of a step.
- Rope: rope_tables.py.
- RMS norms, in two thirds of the operations: a small operation costs some 5 us, whatever it computes.

A GPU has none of these, so nothing is changed there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models import activations
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.attention.constants import constant
from mlxpaged.attention.lanes import assign, shares
from mlxpaged.attention.powers import power_of
from mlxpaged.cpu import blas
from mlxpaged.models.joined import join_projections
from mlxpaged.models.laned import LinearByInput, share_out_layers
from mlxpaged.models.rope_tables import turn_by_tables

LINEAR = (Linear, QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)

swiglu_of_mlx_lm: Callable[[mx.array, mx.array], mx.array] = activations.swiglu

OPENBLAS_ROWS = 4
"""Rows that OpenBLAS's float32 routines compute together, on most processors. Others are computed in twos and ones, and
that takes longer: all products of an 80-million model 26 ms for 7 rows and 19 ms for 8 (docs/performance.md)."""

FROM_ONE_ROW = ("(Haswell)", "(Zen)")
"""Of OpenBLAS's routines, those that take longer for one row and for two than for four."""

ELEMENT = 4e-9
"""Seconds for one element of the activation, on one core: nearly all of it the power."""


def suit_cpu(model: Module) -> None:
    """On a CPU, give the model the activation, the ropes and the linear layers that are fastest there."""
    if mx.default_device() != mx.Device(mx.cpu):
        return
    route_activation(model)
    turn_by_tables(model)
    shorten_norms(model)
    join_projections(model)
    share_out_layers(model)


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
    parts = []
    for rows, on in assign(shares(gate.shape[0], gate.size * ELEMENT)):
        with on:
            parts.append(gated(gate[rows], x[rows]))
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def gated(gate: mx.array, x: mx.array) -> mx.array:
    return gate / (power_of(1 / math.e, gate) + constant(1, gate.shape)) * x


class NormBySum(RMSNorm):
    """An RMS norm of three dimensions and more, such as a step's rows [T, 1, n], with its weight multiplied by the root
    of n: the sum of the squares takes the place of their mean, and n times eps that of eps. Of float32; of other types
    as it was."""

    _rooted: mx.array
    _wide: mx.array
    """`_rooted` in the last rows' shape, which those of the next step have as a rule."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32 or x.ndim < 3:
            own: Callable[[mx.array], mx.array] = super().__call__
            return own(x)
        squares = mx.square(x).sum(axis=-1, keepdims=True)
        scale = mx.rsqrt(squares + constant(x.shape[-1] * self.eps, squares.shape))
        if self._wide.shape != x.shape:
            self._wide = mx.broadcast_to(self._rooted, x.shape)
        return x * scale * self._wide


def shorten_norms(model: Module) -> None:
    for module in model.modules():
        if type(module) is RMSNorm and module.weight.dtype == mx.float32:
            module._rooted = module._wide = module.weight * math.sqrt(module.weight.size)
            mx.eval(module._rooted)
            module.__class__ = NormBySum


def own_bytes(layer: Module) -> int:
    """Of the layer's parameters, without those of layers inside of it."""
    return sum(array.nbytes for array in layer.values() if isinstance(array, mx.array))


@dataclass(frozen=True)
class RowGroups:
    """Rows that products compute together, `size` of them: from `least` rows on, a step takes less time if it is filled
    up to whole groups."""

    size: int = 1
    least: int = 1

    def missing(self, rows: int) -> int:
        return -rows % self.size if rows >= self.least else 0


def row_groups(model: Module) -> RowGroups:
    """Groups of one row where most of its weights are not read by OpenBLAS, for all rows at once: those of other types,
    or of experts."""
    layers = [module for module in model.modules() if isinstance(module, LINEAR)]
    together = sum(own_bytes(layer) for layer in layers if isinstance(layer, LinearByInput))
    if blas.loaded is None or 2 * together <= sum(map(own_bytes, layers)):
        return RowGroups()
    return RowGroups(OPENBLAS_ROWS, least=1 if blas.loaded.endswith(FROM_ONE_ROW) else 3)
