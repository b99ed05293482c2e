"""Sequences in the order in which they are served.

All sequences age at the same rate, so two sequences never change their order as they age. The order is that of
`class + AGING_RATE * arrival time`, then of arrival. Only deadlines change it, within a class: see WaitingQueue.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import attrgetter

from mlxpaged.scheduler.sequence import Priority, Sequence

ORDER = attrgetter("order")
DEADLINE_ORDER = attrgetter("queued_deadline", "arrival_number")


class SequenceQueue:
    """Sorted by `Sequence.order`, which is unique. Adding and removing take a binary search and the shift of a list of
    pointers: 5 microseconds among 10,000 sequences."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it is not here."""
        del self._sequences[self._index(sequence)]

    def _index(self, sequence: Sequence) -> int:
        index = bisect.bisect_left(self._sequences, sequence.order, key=ORDER)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"{sequence} is not in this queue")
        return index


class WaitingQueue(SequenceQueue):
    """Sequences that wait for admission. Of those of a class that have a deadline, the earliest deadline comes first.

    Every sequence brings one position, its `order`. When the position of a sequence with a deadline comes up, the
    earliest deadline of the class takes it and leaves its own position in exchange. So the order of classes stays the
    same, and a sequence without a deadline waits for no more sequences than it would if none had one. Within its
    class, a sequence with a deadline is overtaken only by earlier deadlines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_deadline: defaultdict[Priority, list[Sequence]] = defaultdict(list)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(len(self)))

    def first(self, count: int) -> list[Sequence]:
        """The first `count` in order. Sequences exchange their positions here, if deadlines require it."""
        used: Counter[Priority] = Counter()
        for index in range(min(count, len(self))):
            sequence = self._sequences[index]
            if sequence.queued_deadline < math.inf:
                earliest = self._by_deadline[sequence.priority][used[sequence.priority]]
                used[sequence.priority] += 1
                if earliest is not sequence:
                    self._sequences[self._index(earliest)], self._sequences[index] = sequence, earliest
                    sequence.order, earliest.order = earliest.order, sequence.order
        return self._sequences[:count]

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        sequence.queued_deadline = sequence.next_deadline
        if sequence.queued_deadline < math.inf:
            bisect.insort(self._by_deadline[sequence.priority], sequence, key=DEADLINE_ORDER)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        if sequence.queued_deadline < math.inf:
            others = self._by_deadline[sequence.priority]
            del others[bisect.bisect_left(others, DEADLINE_ORDER(sequence), key=DEADLINE_ORDER)]
