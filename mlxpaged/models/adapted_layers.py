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
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.dora import DoRALinear

from mlxpaged.attention import token_groups
from mlxpaged.cpu.joined_linear import PROJECTIONS
from mlxpaged.models.fused_attention import FusedAttention
from mlxpaged.models.head import RowSelection

IntArray = npt.NDArray[np.int32]

Selected = tuple[str, "mx.array | None"]
"""An adapter, and a mask of the rows that it computes; None for all."""


class StepAdapters:
    """The adapters of the running step's rows, shared by the adapted layers of one model.

    active: the adapters of the step, in a fixed order; None is the base. head: selects the rows of the output head.
    """

    def __init__(self) -> None:
        self.active: tuple[str | None, ...] = ()
        self.head: RowSelection | None = None
        self._host_index: IntArray = np.zeros(0, np.int32)
        self._index: mx.array | None = None
        self._parts: dict[int, mx.array] = {}  # by the identity of the group or the head
        self._masks: dict[int, list[Selected]] = {}
        self._routes_experts = False
        self._decoded: tuple[mx.array, mx.array, mx.array] | None = None

    def begin(self, adapters: Sequence[str | None], query_lens: Sequence[int]) -> IntArray | None:
        """Start a step. adapters, query_lens: of its rows. Returns the index [T] of each token's adapter in `active`,
        which `upload` gets as an array on the device; None if all rows have the same one."""
        self.active = tuple(sorted(set(adapters), key=lambda name: name or ""))
        if len(self.active) == 1:
            return None
        self._host_index = np.repeat([self.active.index(name) for name in adapters], query_lens).astype(np.int32)
        return self._host_index

    def upload(self, index: mx.array) -> None:
        self._index = index

    @contextmanager
    def of_rows(self, adapters: Sequence[str | None], num_tokens: int) -> Iterator[None]:
        """Until the end of the context, rows of so many tokens each are computed outside of a step."""
        index = self.begin(adapters, [num_tokens] * len(adapters))
        try:
            if index is not None:
                self.upload(mx.array(index))
            yield
        finally:
            self.end()

    def end(self) -> None:
        self.active, self._index, self._decoded = (), None, None
        self._parts, self._masks = {}, {}

    def masks(self) -> list[Selected]:
        """The adapters of the rows that the running module gets, with the rows of each."""
        if len(self.active) < 2:
            return [(name, None) for name in self.active if name is not None]
        group = token_groups.running
        if group is not None and not group.is_rows:  # a piece of one sequence
            name = self.active[self._host_index[group.first]]
            return [] if name is None else [(name, None)]
        index = self.index()
        if id(index) not in self._masks:
            self._masks[id(index)] = self.masks_of(index)
        return self._masks[id(index)]

    def masks_of(self, index: mx.array) -> list[Selected]:
        return [(name, index == i) for i, name in enumerate(self.active) if name is not None]

    def index(self) -> mx.array:
        """The index of the adapter of each row that the running module gets, if the step's rows differ."""
        assert self._index is not None
        group, head = token_groups.running, self.head
        if group is not None:
            if id(group) not in self._parts:
                self._parts[id(group)] = group.first_tokens(self._index)
            return self._parts[id(group)]
        if head is not None and head.is_projecting:
            if id(head) not in self._parts:
                self._parts[id(head)] = head(self._index)
            return self._parts[id(head)]
        return self._index

    # -- experts -----------------------------------------------------------------------------------------------------

    @contextmanager
    def route_experts(self) -> Iterator[None]:
        """Until the end of the context, indices of experts also have the index of the row's adapter."""
        self._routes_experts = True
        try:
            yield
        finally:
            self._routes_experts, self._decoded = False, None

    def encode(self, experts: mx.array) -> mx.array | None:
        """Put the index of each row's adapter into its indices of experts [rows, ...]; None if all rows have the same.

        Modules of experts sort their rows by these indices. Rows of one expert are still neighbours afterwards.
        """
        group = token_groups.running
        if len(self.active) < 2 or (group is not None and not group.is_rows):
            return None
        index = as_column(self.index(), experts)
        return experts * len(self.active) + index.astype(experts.dtype)

    def decode(self, encoded: mx.array) -> tuple[mx.array, mx.array | None]:
        """The experts, and the index of the adapter for each of them; None if `encode` has not put one in."""
        if not self._routes_experts:
            return encoded, None
        if self._decoded is None or self._decoded[0] is not encoded:  # the layers of a module get the same array
            count = len(self.active)
            self._decoded = encoded, encoded // count, encoded % count
        return self._decoded[1:]


def as_column(rows: mx.array, like: mx.array) -> mx.array:
    """[n] -> [n, 1, ...] with as many axes as `like` has. Raises ValueError if that has another number of rows."""
    if like.shape[0] != rows.shape[0]:
        raise ValueError(f"a layer with an adapter gets {like.shape[0]} rows for {rows.shape[0]} tokens")
    return rows.reshape(-1, *[1] * (like.ndim - 1))


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
        self._output.output = output
        try:
            return getattr(self._layer, method)(x, *args, **more)
        finally:
            self._output.output = None

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
