"""The interface of a backend's KV pool. LayerKVCache checks arguments; the pool of a backend does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.metadata import AttentionMetadata


class Locality(NamedTuple):
    """The keys before its own that a query sees: all, or as `LayerKVCache.attend` says. At most one is not None."""

    window: int | None = None
    chunk: int | None = None

    def first_key(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Position of the first key that a query at each of `positions` sees."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(positions - (self.window - 1), 0)
        if self.chunk is not None:
            first = positions // self.chunk * self.chunk
        return first


class Options(NamedTuple):
    """Keyword arguments of `LayerKVCache.attend`."""

    scale: float
    locality: Locality
    softcap: float | None
    sinks: mx.array | None


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of a pool's keys and values, as its backend sees them."""


BOUND_ELEMENTS = 8
"""Elements of the array that a kernel gets for a pool: MLX passes smaller arrays in the constant address space."""

MAX_DIMENSION = 2**31 - 1
"""MLX's shapes are int32, and `mx.as_strided` flattens its input first."""


def bind(pool: mx.array) -> mx.array:
    """The array that kernels get for a pool: its first elements, in the pool's own buffer. Kernels reach the whole
    buffer through the pointer, and MLX orders kernels by buffers.

    MLX ends a command buffer if the elements of the arrays bound to it pass a limit (benchmarks/command_buffers.py). So
    a kernel that gets the whole pool ends one at every launch. `mx.as_strided` is reached through its module, so that a
    stand-in can note which array's buffer the result has.
    """
    start = pool if pool.size <= MAX_DIMENSION else pool[:1]
    first = mx.as_strided(start, (BOUND_ELEMENTS,), (1,))
    mx.eval(first)  # in a step it would be an operation for each layer
    return first


@dataclass
class Memory:
    """The arrays of a KV pool. Layers of several cache groups can have pools on the same memory, and each pool sees the
    arrays in the shapes of its own layout. num_blocks: of the layout that the memory was made for. values: None if the
    layout is latent. token: of the last read or write, for a backend that writes in place.

    bound: what kernels get for keys and values. A latent layout's kernels get the keys for both. None for the other
    backends: MLX's operations would copy an array that shares its buffer. reads: what layers have read since the last
    write of the running step, for these backends.
    """

    num_blocks: int
    keys: mx.array
    values: mx.array | None
    token: mx.array | None
    bound: tuple[mx.array, mx.array] | None = field(init=False, default=None)
    reads: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.token is not None:
            keys = bind(self.keys)
            self.bound = keys, keys if self.values is None else bind(self.values)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return tuple(array for array in (self.keys, self.values, self.token) if array is not None)

    @property
    def bindings(self) -> list[mx.array]:
        """The inputs of a step's graph, for a backend that writes in place."""
        assert self.token is not None
        assert self.bound is not None
        return [self.token, *self.bound]

    def rebind(self, arrays: list[mx.array]) -> None:
        """Replace what `bindings` has returned, while a graph is traced."""
        self.token, keys, values = arrays
        self.bound = keys, values

    def replace(self, other: Memory) -> None:
        self.num_blocks, self.bound = other.num_blocks, other.bound
        self.keys, self.values, self.token = other.keys, other.values, other.token
        self.reads = []

    def has_read(self, result: mx.array) -> mx.array:
        """Note that `result` is computed from the arrays. Returns it."""
        self.reads.append(result)
        return result

    def seen_as(self, shapes: Shapes) -> tuple[mx.array, mx.array | None]:
        """Keys and values in these shapes."""
        of_keys, of_values = shapes
        return self.keys.reshape(of_keys), None if self.values is None else self.values.reshape(of_values)

    def write(self, shapes: Shapes, at: Any, keys: mx.array | float, values: mx.array | float | None) -> None:
        """Write at an index of the arrays, seen in these shapes.

        A step with several writes evaluates what was read before each of them. MLX would copy the arrays otherwise,
        because a pending read still refers to them.
        """
        if self.reads:
            mx.eval(self.reads)
            self.reads = []
        self._update("keys", shapes[0], at, keys)
        if values is not None and self.values is not None:
            self._update("values", shapes[1], at, values)

    def _update(self, name: str, shape: tuple[int, ...], at: Any, new: mx.array | float) -> None:
        """While the array is written, nothing else refers to it."""
        array = getattr(self, name).reshape(shape)
        setattr(self, name, None)
        try:
            array[at] = new
        finally:
            setattr(self, name, array)


class KVPool(Protocol):
    """One layer's keys and values. `LayerKVCache` documents the methods and has checked their arguments."""

    def write(self, keys: mx.array, values: mx.array | None, meta: AttentionMetadata) -> None: ...

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array: ...

    def read_context(self, meta: AttentionMetadata) -> mx.array: ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def read_blocks(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]: ...

    def write_blocks(self, ids: Sequence[int], keys: mx.array, values: mx.array) -> None: ...
