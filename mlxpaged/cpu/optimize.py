"""`optimize_for_cpu` makes a loaded model's own operations faster on MLX's CPU backend.

- Query, key and value projections are joined (models/joins/joined_linear.py), and linear layers are split among CPU
  streams (split_linear.py).
- Rope takes cosines and sines from tables (rope_tables.py).
- SwiGLU is computed with exp2: MLX's CPU backend takes 14 ns for an element of a sigmoid, on one core. That was a
  quarter of a decode step of an 80-million model on two cores. GELU is computed by polynomials (gelu.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers import activations as activations_of_mlx
from mlx.nn.layers.base import Module
from mlx_lm.models import activations

from mlxpaged.attention.kv_cache import POOLS
from mlxpaged.cpu import streams
from mlxpaged.cpu.exp2 import exp_of_negative
from mlxpaged.cpu.gelu import gelu, gelu_of_mlx
from mlxpaged.cpu.kv_pool import CpuPool
from mlxpaged.cpu.rope_tables import tabulate_ropes
from mlxpaged.cpu.split_linear import SplitFeedForward, split_linear_layers
from mlxpaged.models.joins.joined_linear import join_projections

POOLS["cpu"] = CpuPool

swiglu_of_mlx_lm: Callable[[mx.array, mx.array], mx.array] = activations.swiglu

ELEMENT = 4e-9
"""Seconds for one element of SwiGLU on one core."""


def optimize_for_cpu(model: Module, has_head: bool = True) -> None:
    """Change the model in place; do nothing if MLX's default device is a GPU. has_head: whether it computes logits."""
    if streams.on_cpu():
        route_activation(model)
        tabulate_ropes(model)
        join_projections(model)
        split_linear_layers(model, has_head)


def parts_of_projection(network: Any, name: str) -> list[tuple[Any, slice, slice]]:
    """The layers that replace a projection of a feed-forward network, with the outputs and the inputs that each has.
    Empty if the network is not split: the projection is still its own layer."""
    found, first = [], 0
    for part in network.parts if isinstance(network, SplitFeedForward) else ():
        units = slice(first, first + part.gate_proj.weight.shape[0])
        first = units.stop
        outputs, inputs = (slice(None), units) if name == "down_proj" else (units, slice(None))
        found.append((part[name], outputs, inputs))
    return found


def route_activation(model: Module) -> None:
    """Replace mlx-lm's `swiglu` and MLX's `gelu` in every module that defines a layer of `model`.

    Models call a module-level function, so other models of the same module get it too. A model's own function of that
    name is left alone.
    """
    for name in {type(module).__module__ for module in model.modules()} & sys.modules.keys():
        module: Any = sys.modules[name]
        if getattr(module, "swiglu", None) is swiglu_of_mlx_lm:
            module.swiglu = swiglu_by_exp2
        if getattr(module, "gelu", None) is gelu_of_mlx and module is not activations_of_mlx:
            module.gelu = gelu


def swiglu_by_exp2(gate: mx.array, x: mx.array) -> mx.array:
    """`gate * sigmoid(gate) * x` for float32. mlx-lm computes other types."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32:
        return swiglu_of_mlx_lm(gate, x)
    parts = []
    for rows, stream in streams.assign(streams.split(gate.shape[0], gate.size * ELEMENT)):
        with stream:
            parts.append(gate[rows] / (exp_of_negative(gate[rows]) + 1) * x[rows])
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]
