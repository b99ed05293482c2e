"""The messages of rank 0: which method of their model runner the other ranks call, with which arguments.

They are JSON, so that a message can do nothing but these calls. Block tables are the largest part of a step. A message
has only the entries that differ from the last step's: a long context adds one block in 32 steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.cache.table_rows import UNUSED
from mlxpaged.engine.step_input import StepInput
from mlxpaged.models.states import StateRow
from mlxpaged.scheduler.batch import BlockMoves


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
        """arguments: integers, BlockMoves, a StepInput, or a mapping of integers."""
        return json.dumps([call, *map(self._plain, arguments)], separators=(",", ":")).encode()

    def _plain(self, argument: Any) -> Any:
        if isinstance(argument, StepInput):
            return self._plain_step(argument)
        if isinstance(argument, BlockMoves):
            return [*map(list, vars(argument).values())]
        return list(argument.items()) if isinstance(argument, Mapping) else argument

    def _plain_step(self, step: StepInput) -> list[Any]:
        ids, tables = step.sequence_ids, step.block_tables
        changed = np.flatnonzero(tables != self._last.expected(ids, tables.shape))
        self._last.keep(ids, tables)
        arrays = (step.token_ids, changed, tables.reshape(-1)[changed], step.wanted)
        pending = None if step.pending is None else step.pending.tolist()
        lengths = [step.query_lens, step.context_lens, tables.shape]
        return [
            *(ids, *lengths, *(array.tolist() for array in arrays)),
            *(pending, step.num_sampled, list(step.states), sorted(step.running)),
        ]


class MessageReader:
    """Reads them on another rank, which must read every message, in order."""

    def __init__(self) -> None:
        self._last = LastTables()

    def read(self, message: bytes) -> tuple[str, list[Any]]:
        """The call and its arguments. Raises ValueError or TypeError for anything that MessageWriter does not write."""
        call, *arguments = json.loads(message)
        if call == "run":
            return call, [self._step(*arguments[0])]
        if call == "move_blocks":
            return call, [BlockMoves(*arguments[0])]
        return call, [dict(each) if isinstance(each, list) else each for each in arguments]

    def _step(
        self,
        ids: list[int],
        query_lens: list[int],
        context_lens: list[int],
        shape: list[int],
        token_ids: list[int],
        changed: list[int],
        blocks: list[int],
        wanted: list[int],
        pending: list[int] | None,
        num_sampled: int,
        states: list[list[Any]],
        running: list[int],
    ) -> StepInput:
        tables = self._last.expected(ids, shape)
        tables.reshape(-1)[changed] = blocks
        self._last.keep(ids, tables)
        token_array, wanted_array = (np.asarray(each, np.int32) for each in (token_ids, wanted))
        return StepInput(
            *(ids, query_lens, context_lens, token_array, tables, wanted_array),
            None if pending is None else np.asarray(pending, np.int32),
            num_sampled,
            [None] * len(ids),
            [StateRow(*row) for row in states],
            set(running),
        )
