"""Joins query, key and value projections into one linear layer, so that CPU streams wait for each other only once.

A decode step of one sequence takes 0.91 of its CPU time with it, of four 0.97 (81-million model, two cores).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from mlxpaged.cpu.split_linear import OUTPUTS, precede

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Joint:
    """The projection that is called first with an array computes the outputs of all three. The others take theirs from
    here. sizes: outputs of each projection."""

    def __init__(self, layer: Module, sizes: list[int]) -> None:
        self.layer = layer
        self._ends = list(itertools.accumulate(sizes))[:-1]
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def output(self, index: int, x: mx.array) -> mx.array:
        if x is not self._input or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self.layer(x), self._ends, axis=-1)))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None  # nothing keeps the array of an earlier step
        return output


class JoinedLinear(Module):
    """A base class that `precede` puts before a linear layer's own class. The joint layer has its parameters."""

    _joint: Joint
    _index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint.output(self._index, x)


def join_projections(model: Module) -> None:
    """Join the projections of one layer at a time, so that memory never holds a second model."""
    for module in model.modules():
        layers: list[Any] = [module.get(name) for name in PROJECTIONS]
        if not all(type(layer) in (Linear, QuantizedLinear) and layer.keys() <= OUTPUTS.keys() for layer in layers):
            continue
        if any(kind_of(layer) != kind_of(layers[0]) for layer in layers):
            continue
        joint = module.joint_proj = copy.copy(layers[0])
        for name in list(joint.keys()):
            joint[name] = mx.concatenate([layer[name] for layer in layers], axis=OUTPUTS[name])
        mx.eval(joint.parameters())
        shared = Joint(joint, [layer.weight.shape[0] for layer in layers])
        for index, layer in enumerate(layers):
            for name in list(layer.keys()):
                del layer[name]
            layer._joint, layer._index = shared, index
            precede(layer, JoinedLinear, "Joined")


def kind_of(layer: Module) -> Any:
    """Equal for layers of one class with the same parameters, types and inputs, quantized alike."""
    parameters = [(name, array.dtype, array.shape[1:]) for name, array in sorted(layer.items())]
    return type(layer), parameters, [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]
