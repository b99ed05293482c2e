"""The messages of rank 0: which method of their model runner the other ranks call, with which arguments.

They are JSON, so that a message can do nothing but these calls. Block tables are the largest part of a step. A message
has only the entries that differ from the last step's: a long context adds one block in 32 steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxpaged.attention.metadata import IntArray, tables_of
from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.step import BlockMoves, Row, Step
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import StoredBlock

OF_STORED_BLOCKS = {"take_blocks", "take_state", "look_up", "read"}
"""The calls whose first argument is StoredBlocks."""


class StoredBlocks(list[StoredBlock]):
    """What is stored or loaded together."""


class LastTables:
    """The block tables of the last step. Writer and reader have the same ones."""

    def __init__(self) -> None:
        self._ids: Sequence[int] = ()
        self._tables: IntArray = np.zeros((1, 0, 0), np.int32)

    def expected(self, sequence_ids: Sequence[int], shape: Sequence[int]) -> IntArray:
        """The tables [G, n, b] of these sequences if nothing has changed; UNUSED for those that were not in the last
        step."""
        expected: IntArray = np.full(shape, UNUSED, np.int32)
        index = {sequence_id: i for i, sequence_id in enumerate(self._ids)}
        known = [(row, index[each]) for row, each in enumerate(sequence_ids) if each in index]
        if known:
            rows, before = np.asarray(known).T
            width = min(expected.shape[2], self._tables.shape[2])
            expected[:, rows, :width] = self._tables[:, before, :width]
        return expected

    def keep(self, sequence_ids: Sequence[int], tables: IntArray) -> None:
        self._ids, self._tables = sequence_ids, tables


class MessageWriter:
    """Writes the messages of rank 0."""

    def __init__(self) -> None:
        self._last = LastTables()

    def write(self, call: str, *arguments: Any) -> bytes:
        """arguments: numbers, BlockMoves, a Step without moves, StoredBlocks, or a mapping or list of integers."""
        return json.dumps([call, *map(self._plain, arguments)], separators=(",", ":")).encode()

    def _plain(self, argument: Any) -> Any:
        if isinstance(argument, Step):
            return self._plain_step(argument)
        if isinstance(argument, BlockMoves):
            return [*map(list, vars(argument).values())]
        if isinstance(argument, StoredBlocks):
            return [[name.key.hex(), name.part, parent.hex(), tokens] for name, parent, tokens in argument]
        return list(argument.items()) if isinstance(argument, Mapping) else argument

    def _plain_step(self, step: Step) -> list[Any]:
        ids, tables = step.sequence_ids, tables_of(step)
        changed = np.flatnonzero(tables != self._last.expected(ids, tables.shape))
        self._last.keep(ids, tables)
        rows = [[*row[:3], row.logits.start, row.logits.stop, *row[4:8], row.shifts, row.spans] for row in step.rows]
        return [rows, tables.shape, changed.tolist(), tables.reshape(-1)[changed].tolist()]


class MessageReader:
    """Reads them on another rank, which must read every message, in order."""

    def __init__(self) -> None:
        self._last = LastTables()

    def read(self, message: bytes) -> tuple[str, list[Any]]:
        """The call and its arguments. Raises ValueError or TypeError for anything that MessageWriter does not write."""
        call, *arguments = json.loads(message)
        if call == "run":
            step, *others = arguments
            return call, [self._step(*step), *others]
        if call == "move_blocks":
            return call, [BlockMoves(*arguments[0])]
        if call == "copy_blocks":
            return call, [dict(arguments[0])]
        if call in OF_STORED_BLOCKS:
            contents, *others = arguments
            return call, [StoredBlocks(stored_block(*each) for each in contents), *others]
        return call, arguments

    def _step(self, rows: list[list[Any]], shape: list[int], changed: list[int], blocks: list[int]) -> Step:
        ids = [row[0] for row in rows]
        tables = self._last.expected(ids, shape)
        tables.reshape(-1)[changed] = blocks
        self._last.keep(ids, tables)
        return Step([row_of(row, table) for row, table in zip(rows, tables.swapaxes(0, 1), strict=True)])


def stored_block(key: str, part: int, parent: str, tokens: list[int]) -> StoredBlock:
    return StoredBlock(Name(bytes.fromhex(key), part), bytes.fromhex(parent), tuple(tokens))


def row_of(entries: list[Any], tables: IntArray) -> Row:
    """The row that MessageWriter has written as these entries."""
    sequence_id, start, token_ids, first, last, num_sampled, restore, checkpoints, adapter, shifts, spans = entries
    row = Row(sequence_id, start, token_ids, range(first, last), num_sampled, restore, checkpoints, adapter)
    return row._replace(tables=tables, shifts=shifts, spans=spans)
