"""An attention's projections to queries, keys and values as one linear layer.

They read the same input. As one layer they are one product on each lane instead of three, and lanes meet once.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from mlxpaged.models.laned import OUTPUTS

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Joint:
    """What the joined layers share. The first that is called computes the outputs of all; the others', of the same
    array, wait here until they are asked for."""

    def __init__(self, layer: Module, sizes: list[int]) -> None:
        """sizes: how many of the layer's outputs each of the joined has."""
        self.layer = layer
        self.ends = list(itertools.accumulate(sizes))
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def output(self, place: int, x: mx.array) -> mx.array:
        if x is not self._input or place not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self.layer(x), self.ends[:-1], axis=-1)))
        output = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return output


class JoinedLayer(Module):
    """Comes before a linear layer's own class: the outputs at `_place` of a joint."""

    _joint: Joint
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        return self._joint.output(self._place, x)

    def __getattr__(self, name: str) -> Any:
        """The parameters, for who reads them."""
        if name in OUTPUTS and hasattr(self._joint.layer, name):
            own: Any = mx.split(getattr(self._joint.layer, name), self._joint.ends[:-1], axis=OUTPUTS[name])
            return own[self._place]
        return super().__getattr__(name)


def join_projections(model: Module) -> None:
    """One attention at a time, so that no second model is in memory."""
    for module in model.modules():
        layers = [module.get(name) for name in PROJECTIONS]
        if can_be_joined(layers):
            module.joint_proj = join(layers)


def can_be_joined(layers: list[Any]) -> bool:
    """Linear layers of one class, with the same parameters, of the same types and inputs, quantized alike."""
    kinds = {type(layer) for layer in layers}
    if kinds not in ({Linear}, {QuantizedLinear}):
        return False
    return all(kind_of(layer) == kind_of(layers[0]) and layer.keys() <= OUTPUTS.keys() for layer in layers)


def kind_of(layer: Module) -> Any:
    parameters = [(name, array.dtype, array.shape[1:]) for name, array in sorted(layer.items())]
    return parameters, [getattr(layer, name, None) for name in ("group_size", "bits", "mode")]


def join(layers: list[Any]) -> Any:
    """The layer that computes the outputs of all of them; they become its parts."""
    names = list(layers[0].keys())
    joint = copy.copy(layers[0])
    for name in names:
        joint[name] = mx.concatenate([layer[name] for layer in layers], axis=OUTPUTS[name])
    mx.eval(joint.parameters())
    shared = Joint(joint, [layer.weight.shape[0] for layer in layers])
    for place, layer in enumerate(layers):
        own = type(layer)
        for name in names:
            del layer[name]
        layer._joint, layer._place = shared, place
        layer.__class__ = type(f"Joined{own.__name__}", (JoinedLayer, own), {})
    return joint
