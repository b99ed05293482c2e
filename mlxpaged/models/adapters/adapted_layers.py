"""Lets the layers of a loaded model compute LoRA adapters beside it: each row of a step by its own adapter, or by none.

An adapted layer is still the model's own module, whose class is changed in place. It computes the base's output first.
mlx-lm's adapter layer then gets this output in place of its base layer. If all rows of a step have one adapter, this is
all. If they differ, a mask selects the rows of each adapter. A step without adapters has the base's operations only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.dora import DoRALinear

from mlxpaged.models.adapters.step_adapters import StepAdapters, as_column
from mlxpaged.models.joins.fused_attention import FusedAttention
from mlxpaged.models.joins.joined_linear import PROJECTIONS


def choose(mask: mx.array, adapted: Any, base: Any) -> Any:
    """The adapted rows where the mask is true. Some layers have several outputs."""
    if isinstance(base, (tuple, list)):
        return type(base)(choose(mask, *pair) for pair in zip(adapted, base, strict=True))
    return mx.where(mask if mask.ndim > 1 else as_column(mask, base), adapted, base)


class BaseOutput:
    """Replaces the base layer inside of mlx-lm's adapter layer: it returns what the base has computed already."""

    def __init__(self, base: Any) -> None:
        self._base = base
        self.output: Any = None

    @contextmanager
    def returning(self, output: Any) -> Iterator[None]:
        """It returns this while the context lasts."""
        self.output = output
        try:
            yield
        finally:
            self.output = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.output

    as_linear = __call__

    @property
    def weight(self) -> mx.array:
        """DoRA's embedding reads it as an output head."""
        weight: mx.array = self._base.weight
        return weight


class AdapterLayer:
    """One adapter's layer for one layer of the model. layer: mlx-lm's, with the weights of the adapter."""

    def __init__(self, layer: Any, base: Module) -> None:
        """base: as mlx-lm has loaded it."""
        self._layer, self._base = layer, base
        self._name = next(name for name, child in layer.children().items() if child is base)
        self._output = BaseOutput(base)
        setattr(layer, self._name, self._output)

    def __call__(self, method: str, output: Any, x: mx.array, *args: Any, **more: Any) -> Any:
        """output: of the base layer's method for the same arguments."""
        with self._output.returning(output):
            return getattr(self._layer, method)(x, *args, **more)

    def part(self, outputs: slice, inputs: slice) -> AdapterLayer:
        """This layer for some outputs and inputs of its base, whose parts are added."""
        part = copy.copy(self)
        part._layer, part._output = copy.copy(self._layer), BaseOutput(self._base)
        setattr(part._layer, self._name, part._output)
        part._layer.lora_a = mx.contiguous(self._layer.lora_a[inputs])
        part._layer.lora_b = mx.contiguous(self._layer.lora_b[:, outputs])
        mx.eval(part._layer.parameters())
        return part


class MagnitudeLayer(AdapterLayer):
    """A DoRALinear. mlx-lm's own call would compute the norms of all weights, which never change, in every step."""

    def __init__(self, layer: Any, base: Any) -> None:
        super().__init__(layer, base)
        self._bias: mx.array | None = base.get("bias")
        adapted = weight_of(base) + (layer.scale * layer.lora_b.T) @ layer.lora_a.T
        self._magnitude = layer.m / mx.linalg.norm(adapted, axis=1)
        mx.eval(self._magnitude)

    def __call__(self, method: str, output: Any, x: mx.array, *args: Any, **more: Any) -> mx.array:
        layer, bias = self._layer, self._bias
        plain = output if bias is None else output - bias
        low_rank = (layer.scale * ((x @ layer.lora_a) @ layer.lora_b)).astype(x.dtype)
        scaled: mx.array = self._magnitude.astype(x.dtype) * (plain + low_rank)
        return scaled if bias is None else scaled + bias

    def part(self, outputs: slice, inputs: slice) -> AdapterLayer:
        part = super().part(outputs, inputs)
        assert isinstance(part, MagnitudeLayer)
        part._magnitude = self._magnitude[outputs]
        return part


def weight_of(linear: Any) -> mx.array:
    """[out, in]"""
    weight: mx.array = linear.weight
    if isinstance(linear, QuantizedLinear):
        sizes = {"group_size": linear.group_size, "bits": linear.bits, "mode": linear.mode}
        weight = mx.dequantize(weight, linear.scales, linear.get("biases"), **sizes)
    return weight


def adapter_layer(layer: Any, base: Module) -> AdapterLayer:
    return (MagnitudeLayer if isinstance(layer, DoRALinear) else AdapterLayer)(layer, base)


PartsOf = Callable[[Any, str], Sequence[tuple[Any, slice, slice]]]
"""Returns the layers that replace a projection of a network, with the outputs and inputs of each; nothing if it is its
own layer."""


def adapt_layers(
    model: Module,
    bases: Mapping[str, Module],
    layers: Mapping[str, Mapping[str, AdapterLayer]],
    step: StepAdapters,
    parts_of: PartsOf,
) -> None:
    """Change layers of the model so that they compute adapters too. bases: the layers as mlx-lm has loaded them, by
    their paths. layers: of each adapter, by the same paths. Call it after all that changes linear layers."""
    modules, routing = dict(model.named_modules()), dict[int, Module]()
    for path, base in bases.items():
        adapters = {name: found[path] for name, found in layers.items() if path in found}
        parent, _, attribute = path.rpartition(".")
        network = modules.get(parent)
        parts = parts_of(network, attribute)
        for part, outputs, inputs in parts:
            adapt_layer(part, {name: layer.part(outputs, inputs) for name, layer in adapters.items()}, step)
        if not parts:
            adapt_layer(base, adapters, step)
        if isinstance(network, (SwitchGLU, SwitchMLP)):
            routing[id(network)] = network
        if isinstance(network, FusedAttention) and attribute in PROJECTIONS:
            network.fusion = replace(network.fusion, adapters=step)
    for network in routing.values():
        route_adapters(network, step)


def adapt_layer(module: Module, adapters: Mapping[str, AdapterLayer], step: StepAdapters) -> None:
    """Override the methods of this module only. Its weights and its path in the parameter tree remain."""
    base = type(module)

    def method(name: str) -> Any:
        own = getattr(base, name)

        def call(self: Any, x: mx.array, *args: Any, **more: Any) -> Any:
            output = own(self, x, *args, **more)
            for adapter, mask in step.masks():
                if (layer := adapters.get(adapter)) is not None:
                    adapted = layer(name, output, x, *args, **more)
                    output = adapted if mask is None else choose(mask, adapted, output)
            return output

        return call

    def call_experts(self: Any, x: mx.array, indices: mx.array, *args: Any, **more: Any) -> mx.array:
        experts, index = step.decode(indices)
        output: mx.array = base.__call__(self, x, experts, *args, **more)
        for adapter, mask in step.masks() if index is None else step.masks_of(index[..., None, None]):
            if (layer := adapters.get(adapter)) is not None:
                adapted = layer("__call__", output, x, experts, *args, **more)
                output = adapted if mask is None else choose(mask, adapted, output)
        return output

    if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)):
        methods: dict[str, Any] = {"__call__": call_experts, "decodes_experts": True}
    else:
        methods = {name: method(name) for name in ("__call__", "as_linear") if hasattr(base, name)}
    module.__class__ = type(base.__name__, (base,), methods)


def route_adapters(module: Module, step: StepAdapters) -> None:
    """Let the layers of a module of experts know the adapter of each row, also after the module has sorted its rows."""
    base = type(module)

    def route(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        encoded = step.encode(indices)
        if encoded is None:
            return base.__call__(self, x, indices)  # type: ignore[no-any-return]
        with step.route_experts():
            return base.__call__(self, x, encoded)  # type: ignore[no-any-return]

    module.__class__ = type(base.__name__, (base,), {"__call__": route})
    for layer in module.children().values():
        is_called = isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)) and not hasattr(layer, "is_joint")
        if is_called and not hasattr(layer, "decodes_experts"):
            adapt_layer(layer, {}, step)
