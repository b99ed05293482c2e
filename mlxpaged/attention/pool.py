"""The memory of a KV pool, and the interface of a backend's pool.

LayerKVCache checks arguments. The pool of a backend writes and reads tokens. The memory moves whole blocks, the same
for all backends and layouts: copy on write, swap, and a pool that grows or shrinks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention import kernels
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, IntArray, padded
from mlxpaged.core.step import Step


class Locality(NamedTuple):
    """The keys that a query sees, as `LayerKVCache.attend` says: by default, all up to its own. window or chunk is
    None. mutual: whether tokens of an image see one another."""

    window: int | None = None
    chunk: int | None = None
    mutual: bool = False

    def first_key(self, positions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Position of the first key that a query at each of `positions` sees."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(positions - (self.window - 1), 0)
        if self.chunk is not None:
            first = positions // self.chunk * self.chunk
        return first

    def last_keys(self, step: Step, sequence: int) -> IntArray:
        """Positions of the last keys that the query tokens of a sequence see."""
        context_len = step.context_lens[sequence]
        last = np.arange(context_len - step.query_lens[sequence], context_len, dtype=np.int32)
        for start, end in step.spans.get(sequence, ()) if self.mutual else ():
            last[(last >= start) & (last < end)] = end - 1
        return last

    def looks_ahead(self, step: Step, sequences: Iterable[int]) -> bool:
        """Whether query tokens of one of `sequences` see keys after their own."""
        return self.mutual and not step.spans.keys().isdisjoint(sequences)


class Options(NamedTuple):
    """Keyword arguments of `LayerKVCache.attend`, and what is computed from them."""

    scale: float
    locality: Locality
    softcap: float | None
    sinks: mx.array | None
    q_pe: mx.array | None = None

    def whole(self, queries: mx.array) -> mx.array:
        """The queries with their rotary part, [..., key_size]."""
        if self.q_pe is None:
            return queries
        # By the scale itself, as the kernel does: half types have another one.
        q_pe = (self.q_pe.astype(mx.float32) / self.scale).astype(queries.dtype)
        return mx.concatenate([queries, q_pe], axis=-1)


Shapes = Sequence[tuple[int, ...]]
"""The shapes of a pool's planes, as its backend sees them."""

Blocks = Sequence[int] | None
"""Blocks of a pool, or None for blocks in arrays of their own."""


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


WORD_BYTES = 16
"""What a thread of block_move copies of a plane. With eight slots or more, a block of every plane is a multiple."""


@dataclass
class Memory:
    """The arrays of a KV pool: one for each plane of its layout. Layers of several cache groups can have pools on the
    same memory, and each pool sees the arrays in the shapes of its own layout. num_blocks: of the layout that the
    memory was made for. token: of the last read or write, for a backend that writes in place. Its arrays have one block
    more, which is never allocated.

    bound: what kernels get for each plane. Empty for the other backends: MLX's operations would copy an array that
    shares its buffer. reads: what layers have read since the last write of the running step, for these backends.
    """

    num_blocks: int
    planes: list[mx.array]
    token: mx.array | None
    bound: list[mx.array] = field(init=False, default_factory=list)
    reads: list[mx.array] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.token is not None:
            self.bound = [bind(plane) for plane in self.planes]

    @classmethod
    def zeros(cls, num_blocks: int, layout: KVLayout, in_place: bool) -> Memory:
        planes = [mx.zeros((num_blocks + in_place, *plane.shape), plane.dtype) for plane in layout.planes]
        return cls(num_blocks, planes, mx.zeros((1,), mx.int32) if in_place else None)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self.planes, self.token) if self.token is not None else tuple(self.planes)

    @property
    def bindings(self) -> list[mx.array]:
        """The inputs of a step's graph, for a backend that writes in place."""
        assert self.token is not None
        return [self.token, *self.bound]

    def rebind(self, arrays: list[mx.array]) -> None:
        """Replace what `bindings` has returned, while a graph is traced."""
        self.token, *self.bound = arrays

    def replace(self, other: Memory) -> None:
        self.num_blocks, self.planes, self.token, self.bound = other.num_blocks, other.planes, other.token, other.bound
        self.reads = []

    def resize(self, num_blocks: int) -> None:
        """Does what `LayerKVCache.resize` says."""
        mx.eval(self.arrays)  # writes in place are done when their token is
        total, missing = num_blocks + (self.token is not None), num_blocks - self.num_blocks
        planes = [plane.reshape(total - missing, -1) for plane in self.planes]
        if missing > 0:
            planes = [mx.pad(plane, [(0, missing), (0, 0)]) for plane in planes]
        else:
            planes = [mx.contiguous(plane[:total]) for plane in planes]
        new = Memory(num_blocks, planes, self.token)
        mx.eval(new.arrays)
        self.replace(new)

    def end_step(self) -> None:
        """Forget what was read: all of it is evaluated before the next step writes."""
        self.reads = []

    def order_after(self, *tokens: mx.array) -> None:
        """The next write waits for the reads and writes that have returned these tokens."""
        self.token = functools.reduce(mx.add, tokens)

    def has_read(self, result: mx.array) -> mx.array:
        """Note that `result` is computed from the arrays. Returns it."""
        self.reads.append(result)
        return result

    def seen_as(self, shapes: Shapes) -> list[mx.array]:
        """The first planes, in these shapes. A layer that is not quantized has none for scales."""
        return [plane.reshape(shape) for plane, shape in zip(self.planes, shapes, strict=False)]

    def write(self, shapes: Shapes, at: Any, new: Sequence[mx.array | float]) -> None:
        """Write at an index of the planes, seen in these shapes.

        A step with several writes evaluates what was read before each of them. MLX would copy the arrays otherwise,
        because a pending read still refers to them.
        """
        if self.reads:
            mx.eval(self.reads)
            self.reads = []
        for i, (shape, rows) in enumerate(zip(shapes, new, strict=True)):
            plane = self.planes.pop(i).reshape(shape)  # while it is written, nothing else refers to it
            try:
                plane[at] = rows
            finally:
                self.planes.insert(i, plane)

    def move(self, parts: int, sources: Blocks, targets: Blocks, staged: Sequence[mx.array] = ()) -> list[mx.array]:
        """Copy blocks onto others, within the pool, into it or out of it. All reads see the pool as it was.

        parts: how many blocks each block of the memory has, for the layout of the caller.
        sources: blocks of the pool. None: those of `staged`, which has an array for each plane.
        targets: blocks of the pool. None: new arrays for the planes, which are returned.
        """
        move = self._move if self.token is None else self._move_in_place
        return move(parts * (self.num_blocks + (self.token is not None)), sources, targets, staged)

    def _move(self, blocks: int, sources: Blocks, targets: Blocks, staged: Sequence[mx.array]) -> list[mx.array]:
        shapes = [(blocks, plane.size // blocks) for plane in self.planes]
        if sources is not None:
            staged = [plane[mx.array([*sources], mx.int32)] for plane in self.seen_as(shapes)]
            mx.eval(staged)  # if a read were still pending, the next write would copy the whole pool
        if targets is None:
            return [*staged]
        rows = [plane.reshape(len(targets), -1) for plane in staged]
        self.write(shapes, mx.array([*targets], mx.int32), rows)
        return []

    def _move_in_place(
        self, blocks: int, sources: Blocks, targets: Blocks, staged: Sequence[mx.array]
    ) -> list[mx.array]:
        """Two planes in a launch."""
        assert self.token is not None
        if set(sources or ()) & set(targets or ()):  # a thread might read a block that another one has overwritten
            staged, sources = self._move_in_place(blocks, sources, None, ()), None
        count = len(sources or targets or ())
        moves = [*zip(sources or range(count), targets or range(count), strict=True)]
        indices = padded(mx.array(moves, mx.int32).flatten())
        results: list[mx.array] = []
        for i in range(0, len(self.planes), 2):
            planes, pools = self.planes[i : i + 2], self.bound[i : i + 2]
            origins = pools if sources is not None else staged[i : i + 2]
            words = [plane.nbytes // blocks // WORD_BYTES for plane in planes] + [0]
            new = [((count, n * WORD_BYTES // 4) if targets is None and n else (1,), mx.uint32) for n in words[:2]]
            *copies, self.token = kernels.launch(
                "block_move",
                [origins[0], origins[-1], pools[0], pools[-1], indices, self.token],
                [("A", words[0]), ("B", words[1]), ("INTO_POOL", targets is not None)],
                grid=(max(words), count, 1),
                threadgroup=(min(max(words), 256), 1, 1),
                outputs=[*new, ((1,), mx.int32)],
            )
            results += [copy.view(plane.dtype) for copy, plane in zip(copies, planes, strict=False)]
        return results if targets is None else []


class KVPool(Protocol):
    """One layer's keys and values. `LayerKVCache` documents the methods and has checked their arguments."""

    def write(self, keys: mx.array, values: mx.array, meta: AttentionMetadata) -> None: ...

    def attend(self, queries: mx.array, meta: AttentionMetadata, options: Options) -> mx.array: ...

    def read_context(self, meta: AttentionMetadata) -> mx.array: ...
