"""A model's linear layers on all of a CPU's cores: each computes its outputs in shares, one on each lane.

A product of few rows reads a matrix once and does little with it. OpenBLAS, where it uses several threads, packs the
matrix as it does for many rows: on two cores 8 rows take 1.8 times as long as one, and 12 take 2.9. In two shares, of
one thread each, they take 1.2 and 1.3 (docs/performance.md). MLX's own products, of half types and of quantized
weights, use one thread; so does the BLAS in its wheel. Two shares on two cores take half of their time.

The usual feed-forward network is shared out as a whole: by its hidden units, whose contributions add up.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.attention import lanes

WEIGHT_BYTE = 0.25e-9
"""Seconds for a byte of weights, on one core: of float32 and a few rows, or one row of a smaller type."""

OUTPUTS: Mapping[str, int] = {"weight": -2, "scales": -2, "biases": -2, "bias": -1}
"""Of a linear layer's parameters, the axis that has its outputs."""
INPUTS: Mapping[str, int] = {"weight": -1}

TILE = 16
"""Outputs that OpenBLAS computes together; others take as long as a whole tile."""

TOLERANCE = 1e-4
"""Of the largest output, in float32: how far the sum of a network's shares may be from what the network computes."""


class LinearByInput(Linear):
    """A linear layer whose matrix is stored as [in, out], which a product with one row reads in three quarters of the
    time. Its weight's shape is still [out, in]."""

    matrix: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return mx.addmm(self["bias"], x, self["matrix"]) if "bias" in self else x @ self["matrix"]

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        return self.matrix.T


class LanedLayer(Module):
    """Comes before a linear layer's own class: [..., in] -> [..., out] by `shares`, layers of that class."""

    shares: list[Any]

    def __call__(self, x: mx.array) -> mx.array:
        return as_before(mx.concatenate(on_lanes(self.shares, x), axis=-1), x)

    def __getattr__(self, name: str) -> Any:
        """The parameters in one piece, for who reads them."""
        if name in OUTPUTS and hasattr(self.shares[0], name):
            return mx.concatenate([getattr(share, name) for share in self.shares], axis=OUTPUTS[name])
        return super().__getattr__(name)


class LanedExperts(LanedLayer):
    """The same of a layer of many experts: it is told which of them a row goes to."""

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        return mx.concatenate(on_lanes(self.shares, x, *args, as_rows=False, **more), axis=-1)


class LanedHead(Module):
    """The same of an embedding that is the output head too. Its weights stay in one piece, where rows are looked up;
    the shares are views of them."""

    _shares: list[Any]

    def as_linear(self, x: mx.array) -> mx.array:
        parts = on_lanes([share.as_linear for share in self._shares], x)
        return as_before(mx.concatenate(parts, axis=-1), x)


class LanedNetwork(Module):
    """Comes before a feed-forward network's own class, [..., in] -> [..., in]: `shares` are networks of that class,
    each with some of its hidden units."""

    shares: list[Any]

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        return as_before(added_up(on_lanes(self.shares, x, *args, **more)), x)


def on_lanes(layers: Sequence[Any], x: mx.array, *args: Any, as_rows: bool = True, **more: Any) -> list[mx.array]:
    """What each computes, on a lane of its own; as_rows: of x as [rows, in]. Each lane makes rows of it by itself: for
    those that another stream makes, it would have to wait."""
    outputs = []
    for layer, on in lanes.assign(layers):
        with on:
            own = x.reshape(-1, x.shape[-1]) if as_rows and x.size else x
            outputs.append(layer(own, *args, **more))
    return outputs


def as_before(rows: mx.array, x: mx.array) -> mx.array:
    """[rows, out], of the rows of x, [..., in] -> [..., out]"""
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def share_out_layers(model: Module) -> None:
    """Let the model's layers use all cores, as far as they are large enough for it. Weights are moved one layer at a
    time, so that no second model is in memory."""
    for network in [module for module in model.modules() if module.keys() == {"gate_proj", "up_proj", "down_proj"}]:
        share_out_network(network)
    networks: list[Any] = [module for module in model.modules() if isinstance(module, LanedNetwork)]
    done = {id(module) for network in networks for module in network.modules()}
    for module in model.modules():
        if id(module) in done:
            continue
        if type(module) in (Linear, QuantizedLinear):
            share_out_layer(module, LanedLayer)
        elif type(module) in (SwitchLinear, QuantizedSwitchLinear):
            share_out_layer(module, LanedExperts)
        elif type(module) in (Embedding, QuantizedEmbedding):
            share_out_head(module)


def share_out_network(network: Module) -> None:
    """Where its layers are of float32, and where its shares do add up to what it computes; it is left alone elsewhere.
    A sum in half types would be rounded once more."""
    layers = [network.gate_proj, network.up_proj, network.down_proj]
    if any(type(layer) is not Linear or layer.weight.dtype != mx.float32 or "bias" in layer for layer in layers):
        return
    hidden, inputs = layers[0].weight.shape
    if layers[1].weight.shape != (hidden, inputs) or layers[2].weight.shape[1] != hidden:
        return
    parts = shares_of(hidden, layers)
    if len(parts) == 1:
        return
    x = mx.random.normal((2, inputs), key=mx.random.key(0))
    shares = []
    for units in parts:
        share = copy.copy(network)
        share.gate_proj, share.up_proj = part(layers[0], units, OUTPUTS), part(layers[1], units, OUTPUTS)
        share.down_proj = part(layers[2], units, INPUTS)
        shares.append(share)
    try:
        adds_up = close(added_up([share(x) for share in shares]), network(x))
    except Exception:  # whatever a network raises that wants something else, or is no sum of its parts
        adds_up = False
    if not adds_up:
        return
    own = type(network)
    for name in list(network.children()):
        del network[name]
    network.shares = shares
    network.__class__ = type(f"Laned{own.__name__}", (LanedNetwork, own), {})


def added_up(outputs: Sequence[mx.array]) -> mx.array:
    return functools.reduce(mx.add, outputs)


def close(outputs: mx.array, expected: mx.array) -> bool:
    """Not so where all is zero, or not a number."""
    return bool((mx.abs(outputs - expected).max() < TOLERANCE * mx.abs(expected).max()).item())


def share_out_layer(layer: Module, laned: type[LanedLayer]) -> None:
    parts = shares_of(layer.weight.shape[-2], [layer])
    if len(parts) == 1:
        store_by_input(layer)
        return
    own = type(layer)
    layer.shares = [part(layer, outputs, OUTPUTS) for outputs in parts]
    for name in list(layer.parameters().keys() & OUTPUTS.keys()):
        del layer[name]
    layer.__class__ = type(f"Laned{own.__name__}", (laned, own), {})


def share_out_head(embedding: Module) -> None:
    parts = shares_of(embedding.weight.shape[0], [embedding])
    if len(parts) == 1:
        return
    own = type(embedding)
    embedding._shares = [part(embedding, outputs, OUTPUTS) for outputs in parts]
    embedding.__class__ = type(f"Laned{own.__name__}", (LanedHead, own), {})


def shares_of(length: int, layers: Sequence[Module]) -> list[slice]:
    """Of an axis of these layers' weights. One where they have parameters that are not known here."""
    if any(not layer.keys() <= OUTPUTS.keys() for layer in layers):
        return [slice(0, length)]
    return lanes.shares(length, sum(layer.weight.nbytes for layer in layers) * WEIGHT_BYTE, TILE)


def part(layer: Module, units: slice, axes: Mapping[str, int]) -> Module:
    """A layer of the same class with these of its outputs or inputs. Rows of a matrix stay where they are; what would
    not lie in one piece is copied."""
    share = copy.copy(layer)
    for name, axis in axes.items():
        whole = layer.get(name)
        if whole is not None:
            some = whole[..., units] if axis == -1 else whole[..., units, :]
            share[name] = some if whole.ndim + axis == 0 else mx.contiguous(some)
    store_by_input(share)
    mx.eval(share.parameters())
    return share


def store_by_input(layer: Module) -> None:
    if type(layer) is Linear and layer.weight.dtype == mx.float32:
        layer.matrix = mx.contiguous(layer.weight.T)
        del layer["weight"]
        layer.__class__ = LinearByInput
        mx.eval(layer.matrix)
