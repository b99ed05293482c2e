"""Positions, slots and block tables of one step: built on the host, uploaded once, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE

IntArray = npt.NDArray[np.int32]

MAX_SLOT = 2**31 - 1
"""Slot numbers are int32."""

UNUSED = -1
"""Fills the rest of a block table."""

MIN_COLUMNS = 8
"""Columns of the uploaded block tables, at least. MLX passes an input of fewer than 8 elements to a Metal kernel in
another address space (mlx/backend/common/metal_kernel.cpp): that would be one more kernel to compile."""


class TableView(NamedTuple):
    """The blocks of a layer: the layer has block `ratio * b + part` of its pool where the table of its cache group has
    block b."""

    group: int = 0
    ratio: int = 1
    part: int = 0


@dataclass(frozen=True)
class AttentionMetadata:
    """A ragged batch of S sequences and T query tokens. All arrays are int32 on the device.

    positions[T]: position of each query token in its sequence. slot_mapping[T]: the slot of each token's key and value,
    `block * block_size + offset`. block_tables[S, max_blocks]: block ids, then UNUSED, at least MIN_COLUMNS. Fields
    named `host_` are lists and NumPy arrays; host_context_lens include the step's query tokens.
    """

    block_size: int
    positions: mx.array
    slot_mapping: mx.array
    block_tables: mx.array
    host_query_lens: list[int]
    host_context_lens: list[int]
    host_block_tables: IntArray
    max_block: int
    derived: dict[Any, Any] = field(default_factory=dict)
    """Data that a backend computes once for this step and reuses in every layer with these block tables."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """Data of the same kind that do not depend on block tables: layers with other tables reuse them too."""

    @property
    def num_tokens(self) -> int:
        return int(self.positions.shape[0])

    def part(
        self, sequences: slice, tokens: slice, query_lens: list[int], context_lens: list[int]
    ) -> AttentionMetadata:
        """Metadata of some sequences of the step and their query tokens, or of some of the tokens of one sequence."""
        return AttentionMetadata(
            block_size=self.block_size,
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            block_tables=self.block_tables[sequences],
            host_query_lens=query_lens,
            host_context_lens=context_lens,
            host_block_tables=self.host_block_tables[sequences],
            max_block=self.max_block,
        )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> AttentionMetadata:
        """Token j of the n query tokens of sequence i is at position `context_lens[i] - n + j`.

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
        [meta], _ = cls.upload(list(query_lens), list(context_lens), tables[None], block_size)
        return meta

    @classmethod
    def upload(
        cls,
        query_lens: list[int],
        context_lens: list[int],
        block_tables: IntArray,
        block_size: int,
        more: Sequence[IntArray] = (),
        views: Sequence[TableView] = (TableView(),),
    ) -> tuple[list[AttentionMetadata], list[mx.array]]:
        """Do the same as `build` for each view, without most checks, for the scheduler's numbers.

        block_tables[G, S, b]: of each cache group. Entries without a block are UNUSED. more: vectors that go to the
        device in the same upload. They are returned in order. Raises ValueError if a query token has no block: it would
        be written into a block of another sequence.
        """
        query: IntArray = np.asarray(query_lens, dtype=np.int32)
        context: IntArray = np.asarray(context_lens, dtype=np.int32)
        last = (context - 1) // block_size
        if last.max() >= block_tables.shape[2]:
            raise ValueError(f"block tables are too short for contexts of {context_lens} tokens")
        owner = np.repeat(np.arange(len(query)), query)
        starts = np.cumsum(query) - query
        positions = (np.arange(len(owner)) - starts[owner] + (context - query)[owner]).astype(np.int32)
        index, offset = positions // block_size, positions % block_size
        tables = [blocks_of(block_tables[view.group], view) for view in views]
        slots = [(table[owner, index] * block_size + offset).astype(np.int32) for table in tables]
        if min(int(each.min()) for each in slots) < 0:
            raise ValueError(f"block tables lack blocks for contexts of {context_lens} tokens")
        columns = max(MIN_COLUMNS, block_tables.shape[2])
        padded = [np.full((len(query), columns), UNUSED, dtype=np.int32) for _ in tables]
        for wide, table in zip(padded, tables, strict=True):
            wide[:, : table.shape[1]] = table
        parts = [positions, *slots, *(table.reshape(-1) for table in padded), *more]
        ends = np.cumsum([part.size for part in parts[:-1]]).tolist()
        uploaded = list(mx.split(mx.array(np.concatenate(parts)), ends))
        shared: dict[Any, Any] = {}
        metas = [
            cls(
                block_size=block_size,
                positions=uploaded[0],
                slot_mapping=uploaded[1 + i],
                block_tables=uploaded[1 + len(views) + i].reshape(-1, columns),
                host_query_lens=query_lens,
                host_context_lens=context_lens,
                host_block_tables=table,
                max_block=int(table.max()),
                shared=shared,
            )
            for i, table in enumerate(tables)
        ]
        return metas, uploaded[1 + 2 * len(views) :]


def blocks_of(table: IntArray, view: TableView) -> IntArray:
    """The block ids of a view's layers."""
    if view.ratio == 1:
        return table
    blocks: IntArray = np.where(table < 0, UNUSED, table * view.ratio + view.part).astype(np.int32)
    return blocks
