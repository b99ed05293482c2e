"""The block tables of all sequences that hold blocks, in one array, ready to be selected from for a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

UNUSED = -1
"""Fills a row behind the end of its table, as the attention's metadata wants it."""


class TableRows:
    """A row of block ids for every table, which the table itself writes whenever it changes: most steps change none,
    and a table that grows adds its new blocks only. The array becomes larger when rows or columns run out."""

    def __init__(self) -> None:
        self._ids: IntArray = np.full((4, 8), UNUSED, dtype=np.int32)
        self._lengths: IntArray = np.zeros(4, dtype=np.int32)
        self._free = list(range(4))

    def take(self) -> int:
        """A row to be written from its first entry on: it may still have what its last table had."""
        if not self._free:
            size = len(self._ids)
            self._free = list(range(size, 2 * size))
            self._ids = np.concatenate([self._ids, np.full_like(self._ids, UNUSED)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, first: int, block_ids: Sequence[int]) -> None:
        """From entry `first` on, the row's table is `block_ids` now."""
        end = first + len(block_ids)
        while end > self._ids.shape[1]:
            self._ids = np.concatenate([self._ids, np.full_like(self._ids, UNUSED)], axis=1)
        self._ids[row, first:end] = block_ids
        self._ids[row, end : self._lengths[row]] = UNUSED
        self._lengths[row] = end

    def select(self, rows: Sequence[int]) -> IntArray:
        """A copy of some rows [n, b], b that of the longest; UNUSED behind the end of the others."""
        index = np.asarray(rows, dtype=np.intp)
        return self._ids[index, : self._lengths[index].max(initial=0)]
