"""Keeps the block tables of all sequences in one array, from which a step selects its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

UNUSED = -1
"""Fills the rest of a row, as the attention metadata requires."""


class TableRows:
    """One row of block ids per table. A table writes its row when it changes: most steps change none, and a table that
    grows writes only its new blocks. The array grows when it has too few rows or columns."""

    def __init__(self) -> None:
        self._ids: IntArray = np.full((4, 8), UNUSED, dtype=np.int32)
        self._lengths: IntArray = np.zeros(4, dtype=np.int32)
        self._free = list(range(4))

    def take(self) -> int:
        """Take a free row. It may contain old ids: write it from its first entry on."""
        if not self._free:
            size = len(self._ids)
            self._free = list(range(size, 2 * size))
            self._ids = np.concatenate([self._ids, np.full_like(self._ids, UNUSED)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        return self._free.pop()

    def release(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, first: int, block_ids: Sequence[int]) -> None:
        """Replace the row's entries from `first` on with `block_ids`."""
        end = first + len(block_ids)
        while end > self._ids.shape[1]:
            self._ids = np.concatenate([self._ids, np.full_like(self._ids, UNUSED)], axis=1)
        self._ids[row, first:end] = block_ids
        self._ids[row, end : self._lengths[row]] = UNUSED
        self._lengths[row] = end

    def clear(self, row: int, first: int, end: int) -> None:
        """Make the row's entries from `first` to `end` UNUSED."""
        self._ids[row, first:end] = UNUSED

    def select(self, rows: Sequence[int]) -> IntArray:
        """A copy [n, b] of some rows. b is the length of the longest; shorter rows are padded with UNUSED."""
        index = np.asarray(rows, dtype=np.intp)
        longest = max(self._lengths.take(index).tolist(), default=0)
        return self._ids.take(index, axis=0)[:, :longest]  # an index beside a slice takes ten times as long
