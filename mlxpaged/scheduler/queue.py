"""Sequences in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import attrgetter

from mlxpaged.scheduler.sequence import Sequence

ORDER = attrgetter("order")


class SequenceQueue:
    """Sorted by `Sequence.order`, which is unique and never changes. Adding and removing takes a binary search and the
    shift of a list of pointers: 5 microseconds among 10,000 sequences."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def first(self, count: int) -> list[Sequence]:
        return self._sequences[:count]

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError where it is not here."""
        index = bisect.bisect_left(self._sequences, sequence.order, key=ORDER)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"{sequence} is not in this queue")
        del self._sequences[index]
