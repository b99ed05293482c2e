"""Positions, slots and block tables of one step: built on the host, uploaded once, used by every layer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention.buckets import LEAST, table_width
from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE
from mlxpaged.core.step import Row, Step

IntArray = npt.NDArray[np.int32]

MAX_SLOT = 2**31 - 1
"""Slot numbers are int32."""

ALIGNMENT = 8
"""Elements of a multiple of which an uploaded array begins: kernels may load four at once."""

UNUSED = -1
"""Fills the rest of a block table."""


class TableView(NamedTuple):
    """The blocks of a layer: the layer has block `ratio * b + part` of its pool where the table of its cache group has
    block b."""

    group: int = 0
    ratio: int = 1
    part: int = 0


class Upload:
    """Collects int32 arrays, so that they go to the device as one vector. first: how many arrays are there already."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._arrays: list[IntArray] = []

    def add(self, array: IntArray) -> int:
        """Returns the index of the array among those on the device."""
        self._arrays.append(array)
        return self._first + len(self._arrays) - 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(array.shape for array in self._arrays)

    @property
    def vector(self) -> IntArray:
        """The arrays one after another, each from a multiple of ALIGNMENT on."""
        starts = starts_of(self.shapes)
        vector = np.zeros(starts[-1], np.int32)
        for start, array in zip(starts, self._arrays, strict=False):
            vector[start : start + array.size] = array.reshape(-1)
        return vector


def starts_of(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where the arrays begin in the vector, and its length."""
    sizes = (-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)
    return [0, *itertools.accumulate(sizes)]


def split(vector: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """The arrays of an upload, on the device."""
    parts = [vector[start : start + prod(shape)] for start, shape in zip(starts_of(shapes), shapes, strict=False)]
    return [part if len(shape) == 1 else part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class Planner(NamedTuple):
    """Makes what a backend computes once for a step, for all layers with the same key. `make` puts the arrays of the
    plan into the upload. The plan itself is static: of two steps with equal shapes and plans, the graphs are equal.

    `grow` changes these arrays, which are those of the step before, for a step in which each sequence has one more
    token. It gets the plan, that step, all arrays of the upload, and for how many steps the plan has served. It
    returns False, and changes nothing, if the plan has to be made again."""

    key: Hashable
    make: Callable[[Step, Upload], Any]
    grow: Callable[[Any, Step, Sequence[IntArray], int], bool] = lambda *_: False


@dataclass(frozen=True)
class AttentionMetadata:
    """A step of S sequences and T query tokens for the layers of one view. All arrays are int32 on the device.

    positions[T]: of each query token in its sequence, as the rotary embedding gets it. padded_slots[max(T, 8)]: the
    slot of each token's key and value, `block * block_size + offset`, then UNUSED. block_tables[S, b]: block ids, then
    UNUSED; b is a bucket. host_block_tables: as they were given.
    """

    step: Step
    block_size: int
    positions: mx.array
    padded_slots: mx.array
    block_tables: mx.array
    host_block_tables: IntArray
    max_block: int
    derived: dict[Any, Any] = field(default_factory=dict)
    """Data that a backend computes once for this step and reuses in every layer with these block tables."""
    plans: dict[Hashable, Any] = field(default_factory=dict)
    """Plans by the keys of their planners. They do not depend on block tables: layers with other tables reuse them."""
    arrays: list[mx.array] = field(default_factory=list)
    """All arrays of the step's upload. Plans refer to them by index."""

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_written(self) -> int:
        """The first tokens, whose keys and values are written. Two threads must not write one slot."""
        return self.num_tokens - (self.step.num_repeats or 0)

    @functools.cached_property
    def slot_mapping(self) -> mx.array:
        """[T]"""
        return self.padded_slots[: self.num_tokens]

    def plan(self, planner: Planner) -> Any:
        """The step's plan of that planner, made now if the step was built without it: that is one more upload."""
        if planner.key not in self.plans:
            upload = Upload(len(self.arrays))
            self.plans[planner.key] = planner.make(self.step, upload)
            if upload.shapes:
                self.arrays.extend(split(mx.array(upload.vector), upload.shapes))
        return self.plans[planner.key]

    def part(
        self, sequences: slice, tokens: slice, query_lens: list[int], context_lens: list[int]
    ) -> AttentionMetadata:
        """Metadata of some sequences of the step and their query tokens, or of some of the tokens of one sequence."""
        tables = self.host_block_tables[sequences]
        return AttentionMetadata(
            step=step_of(query_lens, context_lens, tables[None]),
            block_size=self.block_size,
            positions=self.positions[tokens],
            padded_slots=padded(self.padded_slots[tokens]),
            block_tables=self.block_tables[sequences],
            host_block_tables=tables,
            max_block=self.max_block,
        )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int = DEFAULT_BLOCK_SIZE,
        spans: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> AttentionMetadata:
        """Token j of the n query tokens of sequence i is at position `context_lens[i] - n + j`. spans: as in
        Step.

        Raises ValueError if the lists do not fit each other, a length or block id is out of range, or a table is too
        short for its context.
        """
        sequences = len(query_lens)
        if sequences == 0:
            raise ValueError("a batch needs at least one sequence")
        if len(context_lens) != sequences or len(block_tables) != sequences:
            raise ValueError(
                f"query_lens, context_lens and block_tables must have one entry per sequence, "
                f"got {sequences}, {len(context_lens)} and {len(block_tables)}"
            )
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        tables: IntArray = np.full((sequences, max(map(len, block_tables), default=0)), UNUSED, dtype=np.int32)
        for i, (query_len, context_len, table) in enumerate(zip(query_lens, context_lens, block_tables, strict=True)):
            row = np.asarray([query_len, context_len, *table])
            if row.dtype.kind not in "iu":
                raise ValueError(f"sequence {i}: lengths and block ids must be integers")
            if not 1 <= query_len <= context_len:
                raise ValueError(f"sequence {i}: query_len must be in 1..context_len={context_len}, got {query_len}")
            if len(table) * block_size < context_len:
                raise ValueError(f"sequence {i}: {len(table)} blocks of {block_size} cannot hold {context_len} tokens")
            blocks = row[2:]
            if blocks.min() < 0:
                raise ValueError(f"sequence {i}: negative block id {blocks.min()}")
            if blocks.max() > MAX_SLOT // block_size:
                raise ValueError(f"sequence {i}: block id {blocks.max()} is out of range")
            tables[i, : len(table)] = blocks
        step = HostStep.build(step_of(query_lens, context_lens, tables[None], spans or {}), block_size)
        [meta], _ = step.on_device(step.upload())
        return meta


@dataclass(frozen=True)
class HostStep:
    """What is made of a step before its upload. vector: all that goes to the device. tables[S, b]: of each view. plans:
    by key.

    num_more: how many vectors beside the metadata are in the upload. age: steps since the plans were made.
    """

    step: Step
    block_size: int
    tables: Sequence[IntArray]
    plans: dict[Hashable, Any]
    num_more: int
    vector: IntArray
    shapes: tuple[tuple[int, ...], ...]
    age: int = 0

    @classmethod
    def build(
        cls,
        step: Step,
        block_size: int,
        more: Sequence[IntArray] = (),
        views: Sequence[TableView] = (TableView(),),
        planners: Sequence[Planner] = (),
    ) -> HostStep:
        """The metadata of each view, without most checks of `AttentionMetadata.build`, for the scheduler's numbers.

        more: vectors that go to the device in the same upload. planners: of the plans that will be needed. Raises
        ValueError if a query token has no block: it would be written into a block of another sequence.
        """
        query_lens, context_lens, block_tables = step.query_lens, step.context_lens, tables_of(step)
        query: IntArray = np.asarray(query_lens, dtype=np.int32)
        context: IntArray = np.asarray(context_lens, dtype=np.int32)
        for i, of_row in step.spans.items():
            if of_row[-1][1] > context_lens[i]:
                raise ValueError(f"a chunk ends at {context_lens[i]}, within an image that ends at {of_row[-1][1]}")
        owner = np.repeat(np.arange(len(query)), query)
        starts = np.cumsum(query) - query
        positions = (np.arange(len(owner)) - starts[owner] + (context - query)[owner]).astype(np.int32)
        index, offset = np.divmod(positions, block_size)
        tables = [blocks_of(block_tables[view.group], view) for view in views]
        upload = Upload()
        upload.add(positions + shifts_of(step)[owner] if step.is_shifted else positions)
        for table in tables:
            slots = np.full(max(LEAST, len(positions)), UNUSED, np.int32)
            slots[: len(positions)] = slots_of(table, owner, index, offset, block_size, step)
            upload.add(slots)
        for table in tables:
            sequences, width = table.shape
            wide = np.full((sequences, table_width(width)), UNUSED, np.int32)
            wide[:, :width] = table
            upload.add(wide)
        for vector in more:
            upload.add(vector)
        plans = {planner.key: planner.make(step, upload) for planner in planners}
        return cls(step, block_size, tables, plans, len(more), upload.vector, upload.shapes)

    def grown(
        self,
        step: Step,
        more: Sequence[IntArray] = (),
        views: Sequence[TableView] = (TableView(),),
        planners: Sequence[Planner] = (),
    ) -> HostStep | None:
        """What `build` makes, from the step before: in both, the same number of sequences decode, and each context is
        one longer. None if that is not so, or if the shapes or a plan are others. Then the step has to be built."""
        query_lens, context_lens, block_tables = step.query_lens, step.context_lens, tables_of(step)
        before, count = self.step, len(context_lens)
        width = self.shapes[1 + len(views)][1]
        if query_lens != before.query_lens or self.shapes[0] != (count,) or before.num_repeats is not None:
            return None
        if context_lens != [context + 1 for context in before.context_lens]:
            return None
        if table_width(block_tables.shape[2]) != width or len(more) != self.num_more:
            return None
        vector = self.vector.copy()
        arrays = [
            vector[start : start + prod(shape)].reshape(shape)
            for start, shape in zip(starts_of(self.shapes), self.shapes, strict=False)
        ]
        keys = np.asarray(context_lens, np.int32) - 1
        arrays[0][:] = keys + shifts_of(step) if step.is_shifted else keys
        index, offset = np.divmod(keys, self.block_size)
        tables = [blocks_of(block_tables[view.group], view) for view in views]
        for table, slots, wide in zip(tables, arrays[1:], arrays[1 + len(views) :], strict=False):
            slots[:count] = slots_of(table, np.arange(count), index, offset, self.block_size, step)
            wide[:, : table.shape[1]] = table
            wide[:, table.shape[1] :] = UNUSED
        for array, vector_of_step in zip(arrays[1 + 2 * len(views) :], more, strict=False):
            if array.shape != vector_of_step.shape:
                return None
            array[:] = vector_of_step
        age = self.age + 1
        if not all(planner.grow(self.plans[planner.key], step, arrays, age) for planner in planners):
            return None
        return HostStep(step, self.block_size, tables, self.plans, self.num_more, vector, self.shapes, age)

    @property
    def signature(self) -> Hashable:
        """Equal for steps with equal graphs. None if a sequence has several query tokens: such steps differ."""
        if max(self.step.query_lens) > 1:
            return None
        return self.shapes, tuple(self.plans.items())

    @functools.cached_property
    def max_blocks(self) -> list[int]:
        """The largest block id of each view."""
        return [int(table.max()) for table in self.tables]

    def upload(self) -> mx.array:
        """Copy all of it to the device."""
        return mx.array(self.vector)

    def on_device(self, vector: mx.array) -> tuple[list[AttentionMetadata], list[mx.array]]:
        """The metadata of each view, and `more` in order. vector: what `upload` has returned for this step, or for one
        of the same signature."""
        arrays = split(vector, self.shapes)
        plans, views = dict(self.plans), len(self.tables)
        metas = [
            AttentionMetadata(
                step=self.step,
                block_size=self.block_size,
                positions=arrays[0],
                padded_slots=arrays[1 + i],
                block_tables=arrays[1 + views + i],
                host_block_tables=table,
                max_block=max_block,
                plans=plans,
                arrays=arrays,
            )
            for i, (table, max_block) in enumerate(zip(self.tables, self.max_blocks, strict=True))
        ]
        first = 1 + 2 * views
        return metas, arrays[first : first + self.num_more]


def tables_of(step: Step) -> IntArray:
    """The tables [G, S, b] of a step's S rows."""
    tables: IntArray = np.array([row.tables for row in step.rows], dtype=np.int32).swapaxes(0, 1)
    return tables


def shifts_of(step: Step) -> IntArray:
    """[S]: what the rotary embedding gets beside the position of each token of a row. A row that this does not describe
    shows images: then the rotary embedding does not use it."""
    shifts: IntArray = np.array([row.shift for row in step.rows], np.int32)
    return shifts


def step_of(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: IntArray,
    spans: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> Step:
    """A step of rows with these lengths, tables [G, S, b] and spans. Their tokens do not matter."""
    parts = zip(query_lens, context_lens, block_tables.swapaxes(0, 1), strict=True)
    return Step(
        [
            Row(i, context_len - query_len, range(query_len), tables=tables, spans=spans.get(i, ()))
            for i, (query_len, context_len, tables) in enumerate(parts)
        ]
    )


def slots_of(
    table: IntArray, owner: npt.NDArray[Any], index: IntArray, offset: IntArray, block_size: int, step: Step
) -> IntArray:
    """The slot of each query token, from its sequence, the index of its block there, and its offset in the block.
    Raises ValueError for a token without a block."""
    if index.max() >= table.shape[1]:
        raise ValueError(f"block tables are too short for contexts of {step.context_lens} tokens")
    slots: IntArray = table.take(owner * table.shape[1] + index) * block_size + offset
    if slots.min() < 0:
        raise ValueError(f"block tables lack blocks for contexts of {step.context_lens} tokens")
    return slots


def distinct_rows(step: Step) -> IntArray:
    """Indices [n]: for each row of a tile, that of the first one that is the same."""
    count = len(step)
    first: IntArray = np.minimum(np.arange(count), count - (step.num_repeats or 0) - 1).astype(np.int32)
    return first


def padded(array: mx.array) -> mx.array:
    """The vector, with UNUSED at its end if it is shorter than LEAST."""
    return mx.pad(array, (0, max(0, LEAST - len(array))), constant_values=UNUSED) if len(array) < LEAST else array


def blocks_of(table: IntArray, view: TableView) -> IntArray:
    """The block ids of a view's layers."""
    if view.ratio == 1:
        return table
    blocks: IntArray = np.where(table < 0, UNUSED, table * view.ratio + view.part).astype(np.int32)
    return blocks
