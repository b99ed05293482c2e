"""The weights of a model: read in parts, so that a display can follow, and how they are quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map

from mlxpaged.cpu.float32 import (
    Choice,
    Sizes,
    Storage,
    arrays_of,
    choose,
    holds_arrays,
    sizes_of,
    unique_modules,
    widen,
)
from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.progress import ReportAmount

READ_BYTES = 2**27
"""Bytes of weights that are read at once: about 40 ms from the SSD of a Mac, so that a display can follow."""

MODES = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
"""How weights of so many bits and group size are quantized if they have no biases."""


class WeightReader:
    """Reads the weights of a model, and of its draft head and its vision tower, in the type in which they are computed.

    dtype: "auto", "float32" or "model"; only a CPU computes in another type than the checkpoint's. reserved: bytes that
    are needed in addition. report: gets the bytes that are read, and of all. group_bytes: as `read_weights` has it.
    """

    def __init__(self, dtype: str, reserved: int, report: ReportAmount, group_bytes: int = READ_BYTES) -> None:
        self._dtype, self._reserved, self._report, self._group_bytes = dtype, reserved, report, group_bytes

    def choose(self, sizes: Sizes) -> Choice:
        """How weights of these sizes are stored. Raises MemoryError."""
        return choose(self._dtype, sizes, self._reserved, free_device_memory)

    def read(self, model: Module) -> tuple[Choice, Sizes]:
        """Evaluate the weights of a model that mlx-lm has made, and convert them in place. Returns how they are stored
        now, and their sizes before. Raises MemoryError, and what the report raises."""
        sizes = sizes_of(model)
        choice = self.choose(sizes)
        if choice.storage is Storage.MODEL:
            read_weights(model, self._report, self._group_bytes)
        else:
            widen(model, choice.storage, self._report)
        return choice, sizes


def read_weights(model: Module, report: ReportAmount, group_bytes: int = READ_BYTES) -> None:
    """Evaluate the weights, which mlx-lm has left to be read when they are needed, in groups of so many bytes.

    The total is that of the weights which the model has. Its files may have more, for example an image encoder's.
    """
    # mlx-lm has begun random weights. Each adds 2 KB to the graph of MLX's random state, which is not freed otherwise.
    mx.eval(mx.random.state)
    weights: Any = tree_flatten(model.parameters())
    total, done, group = sum(array.nbytes for _, array in weights), 0, 0
    waiting: list[mx.array] = []
    report(0, total)
    for _, array in weights:
        waiting.append(array)
        group += array.nbytes
        if group >= group_bytes or done + group == total:
            mx.eval(waiting)
            done, group, waiting = done + group, 0, []
            report(done, total)


def recast(model: Module, before: mx.Dtype, after: mx.Dtype, report: ReportAmount = lambda done, total: None) -> None:
    """Give weights, scales and constants of one type another one, in place, one module at a time. What the model has in
    a third type stays. report: gets the bytes that are done, and of all."""
    modules = list(unique_modules(model))
    total, done = sum(array.nbytes for module in modules for _, array in arrays_of(module)), 0
    report(0, total)
    for module in modules:
        for name, value in list(module.items()):
            if holds_arrays(value):
                dict.__setitem__(module, name, tree_map(lambda each: recast_array(each, before, after), value))
        own = [array for _, array in arrays_of(module)]
        if own:
            mx.eval(own)
            done += sum(array.nbytes for array in own)
            report(done, total)


def recast_array(array: Any, before: mx.Dtype, after: mx.Dtype) -> Any:
    return array.astype(after) if isinstance(array, mx.array) and array.dtype == before else array


def computed_dtype(model: Module) -> str:
    """The type of most of its floating-point weights, or of the scales if they are quantized, as "bfloat16"."""
    weights: Any = tree_flatten(model.parameters())
    sizes: dict[mx.Dtype, int] = {}
    for _, array in weights:
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return str(max(sizes, key=lambda dtype: sizes[dtype], default=mx.float32)).removeprefix("mlx.core.")


def quantization(path: str, module: Any, weights: Mapping[str, mx.array]) -> bool | dict[str, Any]:
    """How the weights of a module are quantized, by their shapes; False if they are not."""
    scales = weights.get(f"{path}.scales")
    if scales is None:
        return False
    size = module.weight.shape[-1]
    bits, group = 32 * weights[f"{path}.weight"].shape[-1] // size, size // scales.shape[-1]
    mode = "affine" if f"{path}.biases" in weights else MODES[bits, group]
    return {"bits": bits, "group_size": group, "mode": mode}
