"""Compares the sizes in a model's config.json with its weights, before a model object is built.

The header of a safetensors file has the name, type, shape and place of each tensor, so no weights are read. mlx-lm
builds a model by its config.json alone: with a million layers, that takes hours and all memory.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import check_file

MAX_HEADER_BYTES = 2**22
"""The header of a file with 30,000 tensors is as large. The largest models have 200,000, in a hundred files. Other
threads wait while it is parsed, and while MLX makes arrays of it: 0.25 s for one of this size."""

ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Other types are refused by MLX."""

MAX_LAYERS = 4096
FEW_LAYERS = 256
"""So many are built in 0.1 s, whatever the weights have. Some models use one layer several times."""
MAX_EXPERTS = 2**17
"""Experts of all layers, if the weights have fewer tensors. Kimi K2 has 23,424. A few architectures have an object for
each."""
FREE_SIZE = 2**20
"""A size up to this is not checked here: arrays are lazy, and mlx-lm compares their shapes."""
PACKED = 32
"""Most numbers in an item of a quantized tensor."""

COUNT = re.compile(r"(layers?|blocks|depth|loops|loop_num|iters)$")
LISTED = re.compile(r"layer|block|pattern|module")
SIZE = re.compile(r"^(num|n|d)_|(size|dim|heads?|rank|embd|inner|channels|num)$")
NO_SIZE = re.compile(r"position|token|window|chunk|length|context|ctx|seq|param|sample|step")
"""Names of fields: numbers of layers; lists and texts with an item for each layer; sizes; and what is no size of a
tensor, though its name looks like one."""


class Weights(NamedTuple):
    """num_tensors: of all files. largest: the largest dimension of a tensor."""

    num_tensors: int
    largest: int


def check_sizes(config: Mapping[str, Any], shapes: list[list[int]]) -> None:
    """Raises UnsupportedModelError if the config asks for more than weights of these shapes can have."""
    found = Weights(len(shapes), max((max(shape, default=1) for shape in shapes), default=1))
    layers, experts = 1, 1
    for name, value in fields(config):
        amount = len(value) if isinstance(value, (str, list)) else value
        if COUNT.search(name) or (LISTED.search(name) and amount is not value):
            layers = max(layers, amount)
            check_layers(name, amount, found)
        elif amount is value and SIZE.search(name) and not NO_SIZE.search(name):
            limit = max(FREE_SIZE, PACKED * found.largest)
            if amount > limit:
                raise UnsupportedModelError(
                    f"its config.json has {name} {amount:,}, but the largest dimension of its weights is "
                    f"{found.largest:,}"
                )
        if name.endswith("experts") and amount is value:
            experts = max(experts, amount)
    if layers * experts > max(MAX_EXPERTS, found.num_tensors):
        raise UnsupportedModelError(
            f"its config.json asks for {experts:,} experts in {layers:,} layers, but its weights have "
            f"{found.num_tensors:,} tensors"
        )


def check_layers(name: str, amount: int, found: Weights) -> None:
    if amount > max(FEW_LAYERS, found.num_tensors):
        raise UnsupportedModelError(
            f"its config.json asks for {amount:,} layers ({name}), but its weights have {found.num_tensors:,} tensors"
        )
    if amount > MAX_LAYERS:
        raise UnsupportedModelError(
            f"its config.json asks for {amount:,} layers ({name}); at most {MAX_LAYERS:,} are supported"
        )


def fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The integers, texts and lists of a config and of its parts, with their names."""
    parts = [config]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, (int, str, list)) and not isinstance(value, bool):
                yield name, value


class StoredTensor(NamedTuple):
    """dtype: as the file names it, one of ITEM_BITS or another one."""

    name: str
    dtype: str
    shape: list[int]


def read_shapes(path: Path, most_bytes: int = MAX_HEADER_BYTES) -> list[list[int]]:
    """The shapes of `read_tensors`."""
    return [tensor.shape for tensor in read_tensors(path, most_bytes)]


def read_tensors(path: Path, most_bytes: int = MAX_HEADER_BYTES) -> list[StoredTensor]:
    """The tensors of a safetensors file, by its header. most_bytes: of the header. Raises UnsupportedModelError if the
    file does not have what its header says, or is none."""
    check_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= num_bytes <= size - 8:
            raise UnsupportedModelError(f"its {path.name} is not a safetensors file, or is cut short")
        if num_bytes > most_bytes:
            raise UnsupportedModelError(f"the header of its {path.name} has {num_bytes:,} bytes, above {most_bytes:,}")
        text = file.read(num_bytes)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [(name, each["dtype"], each["shape"], *each["data_offsets"]) for name, each in header.items()]
        for name, dtype, shape, begin, end in tensors:
            if not all(type(each) is int and each >= 0 for each in (*shape, begin, end)):
                raise ValueError(f"{name} has a bad shape")
            bits = ITEM_BITS.get(dtype)
            if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
                raise ValueError(f"the bytes of {name} do not fit its shape")
            if end > size - 8 - num_bytes:
                raise ValueError(f"{name} is cut short")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = str(error) if type(error) is ValueError else "its header is damaged"
        raise UnsupportedModelError(f"its {path.name} is not usable: {message}") from error
    return [StoredTensor(name, dtype, shape) for name, dtype, shape, _, _ in tensors]
