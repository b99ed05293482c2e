"""Sequences in the order in which they are served.

All sequences age at the same rate, so comparing effective priorities at any time gives the order of one constant:
class + AGING_RATE * arrival time, then arrival. Deadlines change which sequence of a class uses which turn: see
WaitingQueue.
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
    """Sequences that wait for admission, with the earliest deadline first among those of a class that have one.

    Every sequence brings one turn, its `order`. When the turn of a sequence with a deadline comes, the one of its class
    with the earliest deadline takes that turn and leaves its own in exchange. So classes age as without deadlines, a
    sequence that has none never waits for more sequences than without deadlines, and one that has a deadline is
    overtaken until that time at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_deadline: defaultdict[Priority, list[Sequence]] = defaultdict(list)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(len(self)))

    def first(self, count: int) -> list[Sequence]:
        """The first `count` in order. Exchanges their turns if needed."""
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
