"""Split linear layers: each computes its outputs in parts, one part per CPU stream.

OpenBLAS with several threads packs a weight matrix for a few rows as it does for many: on two cores, 8 rows take 1.8
times as long as one. In two parts of one thread each they take 1.2 times as long (docs/performance.md). MLX's own
products, of half types and quantized weights, use one thread; two parts on two cores take half of the time.

A feed-forward network with gate, up and down projections is split as a whole by its hidden units, whose contributions
are added, so that streams wait for each other once instead of four times.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.cpu import small_products, streams
from mlxpaged.models.joins.joined_linear import KINDS, OUTPUTS, InParts, precede
from mlxpaged.trials import Trials, record_all

WEIGHT_BYTE = 0.25e-9
"""Seconds for a byte of weights on one core: a few rows of float32, or one row of a smaller type."""

INPUTS: Mapping[str, int] = {"weight": -1}

TILE = small_products.TILE
"""A part has a multiple of as many outputs."""

TOLERANCE = 1e-4
"""Largest difference between a split network and the whole one, as a share of the largest output, in float32."""


KINDS.add(small_products.WeightFirstLinear)


class SplitLinear(Module):
    """A base class before that of a linear layer, or of a layer of experts. parts: layers of that class.
    [..., in] -> [..., out]"""

    parts: list[Any]

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        return on_streams(self.parts, join, x, *args, **more)

    def __getattr__(self, name: str) -> Any:
        """The parameters in one piece, for code that reads them."""
        if name in OUTPUTS and hasattr(self.parts[0], name):
            return mx.concatenate([getattr(part, name) for part in self.parts], axis=OUTPUTS[name])
        return super().__getattr__(name)


class SplitHead(Module):
    """An embedding that is also the output head. It keeps its weights; the parts are views of them."""

    _parts: list[Any]

    def as_linear(self, x: mx.array) -> mx.array:
        return on_streams([part.as_linear for part in self._parts], join, x)


class SplitFeedForward(InParts):
    """Its parts have some of the hidden units each; [..., in] -> [..., in]"""

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        return on_streams(self.parts, add, x, *args, **more)


def on_streams(
    layers: Sequence[Any], combine: Callable[[Sequence[mx.array]], mx.array], x: mx.array, *args: Any, **more: Any
) -> mx.array:
    """The layers' outputs, each of a stream of its own. Layers that take nothing but x get it as [rows, in]."""
    as_rows = x.size > 0 and not args and not more
    rows = x.reshape(-1, x.shape[-1]) if as_rows else x
    outputs = []
    for layer, stream in streams.assign(layers):
        with stream:
            outputs.append(layer(rows, *args, **more))
    out = combine(outputs)
    return out.reshape(*x.shape[:-1], out.shape[-1]) if as_rows else out


def join(outputs: Sequence[mx.array]) -> mx.array:
    return mx.concatenate(list(outputs), axis=-1)


def add(outputs: Sequence[mx.array]) -> mx.array:
    return functools.reduce(mx.add, outputs)


def split_linear_layers(model: Module, has_head: bool = True) -> None:
    """Split the layers of `model` that are large enough, one at a time, so that memory never holds a second model.
    has_head: whether it computes logits. An embedding is its head if no linear layer has a matrix of that shape."""
    trials = Trials[bool]()
    shapes = [module.weight.shape for module in model.modules() if type(module) in (Linear, QuantizedLinear)]
    for network in [module for module in model.modules() if module.keys() == {"gate_proj", "up_proj", "down_proj"}]:
        split_network(network, trials)
    networks: list[Any] = [module for module in model.modules() if isinstance(module, SplitFeedForward)]
    done = {id(module) for network in networks for module in network.modules()}
    for module in model.modules():
        if id(module) in done:
            continue
        if type(module) in (Linear, QuantizedLinear, SwitchLinear, QuantizedSwitchLinear):
            split_layer(module)
        elif type(module) in (Embedding, QuantizedEmbedding) and has_head and module.weight.shape not in shapes:
            split_head(module)


def split_network(network: Module, trials: Trials[bool]) -> None:
    """Split a float32 network if its parts add up to its outputs on two random rows; else leave it alone. A sum in half
    types would be rounded once more. trials: outcomes for other networks."""
    layers = [network.gate_proj, network.up_proj, network.down_proj]
    if any(type(layer) is not Linear or layer.weight.dtype != mx.float32 or "bias" in layer for layer in layers):
        return
    hidden, inputs = layers[0].weight.shape
    if layers[1].weight.shape != (hidden, inputs) or layers[2].weight.shape[1] != hidden:
        return
    slices = slices_of(hidden, layers)
    if len(slices) == 1:
        return
    x = mx.random.normal((2, inputs), key=mx.random.key(0))
    recorded = record_all(network, [[x]])
    known = trials.known(recorded)
    if known is False:
        return
    parts = []
    for units in slices:
        part = copy.copy(network)
        part.gate_proj, part.up_proj = part_of(layers[0], units, OUTPUTS), part_of(layers[1], units, OUTPUTS)
        part.down_proj = part_of(layers[2], units, INPUTS)
        parts.append(part)
    if known is None:
        trials.note(recorded, adds_up := add_up(network, parts, x))
        if not adds_up:
            return
    for name in list(network.children()):
        del network[name]
    network.parts = parts
    precede(network, SplitFeedForward, "Split")


def add_up(network: Any, parts: Sequence[Any], x: mx.array) -> bool:
    try:
        outputs, expected = add([part(x) for part in parts]), network(x)
        is_sum = mx.abs(outputs - expected).max() < TOLERANCE * mx.abs(expected).max()  # not if all is zero or NaN
        return bool(is_sum.item())
    except Exception:  # a network that takes other arguments, or returns something else
        return False


def split_layer(layer: Module) -> None:
    slices = slices_of(layer.weight.shape[-2], [layer])
    if len(slices) == 1:
        small_products.store_for_products(layer)
        return
    layer.parts = [part_of(layer, outputs, OUTPUTS) for outputs in slices]
    for name in list(layer.parameters().keys() & OUTPUTS.keys()):
        del layer[name]
    precede(layer, SplitLinear, "Split")


def split_head(embedding: Any) -> None:
    slices = slices_of(embedding.weight.shape[0], [embedding])
    small_products.store_for_products(embedding)
    if len(slices) == 1:
        return
    embedding._parts = [part_of(embedding, outputs, OUTPUTS) for outputs in slices]
    precede(embedding, SplitHead, "Split")


def slices_of(length: int, layers: Sequence[Module]) -> list[slice]:
    """How to split an axis of these layers' weights; in one piece if a layer has parameters that are not in OUTPUTS."""
    if any(not layer.keys() <= OUTPUTS.keys() for layer in layers):
        return [slice(0, length)]
    return streams.split(length, sum(layer.weight.nbytes for layer in layers) * WEIGHT_BYTE, TILE)


def part_of(layer: Module, units: slice, axes: Mapping[str, int]) -> Module:
    """A layer of the same class with these outputs or inputs: a view if it is one piece of the weights, else a copy."""
    part = copy.copy(layer)
    for name, axis in axes.items():
        whole = layer.get(name)
        if whole is not None:
            some = whole[..., units] if axis == -1 else whole[..., units, :]
            part[name] = some if whole.ndim + axis == 0 else mx.contiguous(some)
    small_products.store_for_products(part)
    mx.eval(part.parameters())
    return part
