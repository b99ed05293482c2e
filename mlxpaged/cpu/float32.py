"""Computes models with quantized or 16-bit weights in float32 on MLX's CPU backend: nearly all published ones are such.

MLX's own products on a CPU take, on one core, for a matrix of 576 x 1536, in ms:

                                 1 row   128 rows
    4 bits, scales in float16     34       4,154
    4 bits, scales in bfloat16     8.1       828
    4 bits, scales in float32      0.73       83
    float32, with OpenBLAS         0.45        1.8

So weights become float32 when they are read, one layer at a time. If the memory has no room for that, quantized weights
stay as they are, with scales and everything else in float32. A GPU computes what the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.distributed import (
    AllToShardedLinear,
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
    ShardedToAllLinear,
)
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.cpu import streams

SHARE = 0.75
"""Most of the free memory that weights may take when they become float32. The rest is for the KV cache and a step."""

DENSE: Mapping[type[Module], type[Module]] = {
    QuantizedLinear: Linear,
    QuantizedEmbedding: Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
    QuantizedAllToShardedLinear: AllToShardedLinear,
    QuantizedShardedToAllLinear: ShardedToAllLinear,
}
"""The classes of quantized layers, and those of the same layers with plain weights."""

PACKED = ("weight", "scales", "biases")
SETTINGS = ("group_size", "bits", "mode")
"""The parameters and the attributes by which a layer is quantized."""

HALF_TYPES = (mx.float16, mx.bfloat16)


class Storage(Enum):
    """What weights become when they are read. MODEL: they stay as they are. SCALES: quantized ones stay quantized, and
    all else is float32. DENSE: all are float32."""

    MODEL = "model"
    SCALES = "scales"
    DENSE = "dense"


class Sizes(NamedTuple):
    """Bytes of a model's weights in each storage."""

    model: int
    scales: int
    dense: int


class Choice(NamedTuple):
    """reason: why the weights are not DENSE, if the memory decides that; else empty."""

    storage: Storage
    reason: str = ""


UNCHANGED = Choice(Storage.MODEL)


def choose(dtype: str, sizes: Sizes, reserved: int, free: Callable[[], int]) -> Choice:
    """How the weights of a model are stored.

    dtype: "auto", "float32" or "model". reserved: bytes that are needed in addition. free: returns the free bytes.
    Raises MemoryError if "float32" does not fit."""
    if dtype == "model" or not streams.on_cpu() or sizes.dense == sizes.model:
        return UNCHANGED
    left = max(0, free() - reserved)
    if dtype == "float32":
        if sizes.dense > left:
            needed = f"its weights in float32 take {sizes.dense / 1e9:.1f} GB"
            raise MemoryError(f"{needed}, but only {left / 1e9:.1f} GB of memory are free; leave out --cpu-dtype")
        return Choice(Storage.DENSE)
    room = int(SHARE * left)
    if sizes.dense <= room:
        return Choice(Storage.DENSE)
    reason = f"float32 would take {sizes.dense / 1e9:.1f} GB, and weights may take {room / 1e9:.1f} GB of this memory"
    return Choice(Storage.SCALES if sizes.scales <= room else Storage.MODEL, reason)


def sizes_of(model: Module) -> Sizes:
    """Bytes of a model's weights, which need not be read yet."""
    own = scales = dense = 0
    for module in unique_modules(model):
        arrays = list(arrays_of(module))
        wide = sum(widened_bytes(array) for _, array in arrays)
        plain = wide
        if is_packed(module):
            plain = sum(widened_bytes(array) for name, array in arrays if name not in PACKED)
            plain += 4 * module["weight"].size * 32 // module.bits
        own += sum(array.nbytes for _, array in arrays)
        scales += plain if is_unpacked(module, Storage.SCALES) else wide
        dense += plain
    return Sizes(own, scales, dense)


def widen(model: Module, storage: Storage, report: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Read the weights, and convert them in place, one module at a time. report: gets the bytes that are done, and of
    all. It may raise an error that ends the load."""
    mx.eval(mx.random.state)  # as in models/files/weights.py
    sizes = sizes_of(model)
    total, done = sizes.dense if storage is Storage.DENSE else sizes.scales, 0
    report(0, total)
    for module in unique_modules(model):
        if is_unpacked(module, storage):
            unpack(module)
        for name, value in list(module.items()):
            if holds_arrays(value):
                dict.__setitem__(module, name, tree_map(widened, value))
        own = [array for _, array in arrays_of(module)]
        if own:
            mx.eval(own)
            done += sum(array.nbytes for array in own)
            report(done, total)


def unpack(layer: Any) -> None:
    """Make a quantized layer a plain one. Its weight is scale * q + bias, in float32."""
    settings = {name: getattr(layer, name) for name in SETTINGS}
    scales, biases = widened(layer.scales), layer.get("biases")
    biases = None if biases is None else widened(biases)
    layer.weight = mx.dequantize(layer.weight, scales, biases, dtype=mx.float32, **settings)
    for name in PACKED[1:]:
        layer.pop(name, None)
    for name in SETTINGS:
        delattr(layer, name)
    layer.__class__ = DENSE[type(layer)]


def is_packed(module: Any) -> bool:
    """Whether it is a quantized layer that can be a plain one. NVFP4 may have one more scale for all of an expert."""
    return type(module) in DENSE and module.get("global_scale") is None and module["weight"].dtype == mx.uint32


def is_unpacked(module: Any, storage: Storage) -> bool:
    """Whether it is a quantized layer that becomes a plain one. MLX makes rows of 16 bits of an embedding without
    biases, and the whole model would be computed in 16 bits then."""
    is_wanted = storage is Storage.DENSE or (isinstance(module, QuantizedEmbedding) and module.mode != "affine")
    return is_wanted and is_packed(module)


def unique_modules(model: Module) -> Iterator[Any]:
    """Each module once: two layers may have the same."""
    return iter({id(module): module for module in model.modules()}.values())


def arrays_of(module: Module) -> Iterator[tuple[str, mx.array]]:
    """The arrays of a module, without those of modules in it, with the name of the parameter or list that has them."""
    for name, value in module.items():
        if holds_arrays(value):
            leaves: Any = tree_flatten(value)
            yield from ((name, array) for _, array in leaves if isinstance(array, mx.array))


def holds_arrays(value: Any) -> bool:
    """Whether it is an array, or a list or a dictionary of arrays."""
    if isinstance(value, mx.array):
        return True
    if isinstance(value, Module) or not isinstance(value, (list, tuple, dict)):
        return False
    parts = list(value.values() if isinstance(value, dict) else value)
    return bool(parts) and all(map(holds_arrays, parts))


def widened(array: Any) -> Any:
    return array.astype(mx.float32) if isinstance(array, mx.array) and array.dtype in HALF_TYPES else array


def widened_bytes(array: mx.array) -> int:
    return 4 * array.size if array.dtype in HALF_TYPES else int(array.nbytes)
