"""The time of steps without prompts by their rows, as the latest ones took it.

A machine is slower at times, because it is warm or because others use it, and then steps of any number of rows are. So
each step counts in relation to the pace of its time: what was measured of other rows follows that of the latest steps.
More rows never take less time, so numbers of rows that seem to are pooled. Without both, a search for the best number
of rows finds the one whose estimate is wrong most.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

ROW_SAMPLES = 7
"""Latest steps of about as many rows of which the table has the median."""

SHORTEST = 1e-6
"""Shortest time of a step, in seconds: a clock may not tell two steps apart."""

START_WEIGHT = 2
"""Steps as which what was timed at the start counts."""

PACE_STEPS = 7
"""Latest steps of which the pace is the median."""

KEYS_CHANGED = 0.1
"""Share by which the seconds of a key must change before the steps are looked at again."""

LEAST_PACE = 0.01
"""A step of many keys may take less than what they are thought to take."""


def bucket(rows: int) -> int:
    """Numbers of rows that the table counts as one: each below 16 is its own, and every doubling from there has
    eight."""
    shift = max(0, rows.bit_length() - 4)
    return 8 * shift + (rows >> shift)


@dataclass(frozen=True)
class RowTable:
    """What steps of so many rows without prompts take beside their keys, in seconds. rows: measured ones, in order.
    per_key: seconds of each key."""

    rows: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    per_key: float = 0.0

    def of(self, rows: int, more: float = 0.0) -> float:
        """Interpolates. more: of each row beyond the most that was measured. Fewer than the least take as long."""
        after = bisect.bisect_left(self.rows, rows)
        if after == 0:
            return self.seconds[0]
        if after == len(self.rows):
            return self.seconds[-1] + more * (rows - self.rows[-1])
        low, high = self.rows[after - 1], self.rows[after]
        share = (rows - low) / (high - low)
        return (1 - share) * self.seconds[after - 1] + share * self.seconds[after]


NOTHING_TIMED = RowTable()


class TimedStep(NamedTuple):
    """usual: what as many rows were thought to take at a pace of 1."""

    rows: int
    keys: int
    seconds: float
    usual: float


class RowTimes:
    """The latest steps by their rows. start: seconds of steps of so many rows with short contexts, the pace of which
    is 1. If there is none, it is always 1.

    A step counts if the one before it had another number of rows, in relation to the pace of the latest ones of others.
    Steps that all have the same number tell the pace only.
    """

    def __init__(self, start: Mapping[int, float]) -> None:
        self._latest = defaultdict[int, deque[tuple[TimedStep, ListOf[TimedStep]]]](lambda: deque(maxlen=ROW_SAMPLES))
        """The latest steps by bucket, with those that tell the pace of each."""
        self._relative = defaultdict[int, deque[float]](lambda: deque(maxlen=ROW_SAMPLES))
        """Their seconds at a pace of 1, without keys."""
        self._recent = deque[TimedStep](maxlen=PACE_STEPS)
        self._usual = RowTable(tuple(sorted(start)), tuple(start[rows] for rows in sorted(start)))
        self._per_key = 0.0
        for rows, seconds in start.items():
            for _ in range(START_WEIGHT):
                self._add(TimedStep(rows, rows, seconds, seconds), ())

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """keys: that its rows attend to together."""
        if not self._usual.rows:
            self._add(TimedStep(rows, keys, seconds, seconds), ())
            return
        step = TimedStep(rows, keys, seconds, self._usual.of(rows))
        if self._recent and bucket(self._recent[-1].rows) != bucket(rows):
            self._add(step, tuple(each for each in self._recent if bucket(each.rows) != bucket(rows)))
        self._recent.append(step)

    def _add(self, step: TimedStep, others: ListOf[TimedStep]) -> None:
        index = bucket(step.rows)
        self._latest[index].append((step, others))
        self._relative[index].append(self._without_keys(step) / self._pace(others))

    def learn_keys(self, per_key: float) -> None:
        """per_key: seconds of each key. What is nearly known changes nothing."""
        if abs(per_key - self._per_key) > KEYS_CHANGED * self._per_key:
            self._per_key = per_key
            for index, steps in self._latest.items():
                self._relative[index].extend(self._without_keys(step) / self._pace(others) for step, others in steps)

    def _without_keys(self, step: TimedStep) -> float:
        return step.seconds - self._per_key * step.keys

    def _pace(self, steps: Collection[TimedStep]) -> float:
        """How many times as long as usual these steps have taken."""
        return max(median(self._without_keys(step) / step.usual for step in steps), LEAST_PACE) if steps else 1.0

    def table(self) -> RowTable:
        pools: list[tuple[float, int, list[float]]] = []  # seconds, steps, and numbers of rows
        for index, latest in sorted(self._latest.items()):
            seconds, count = median(self._relative[index]), len(latest)
            numbers = [sum(step.rows for step, _ in latest) / count]
            while pools and pools[-1][0] > seconds:  # pool adjacent violators: isotonic regression
                before, steps, others = pools.pop()
                seconds = (before * steps + seconds * count) / (steps + count)
                count, numbers = count + steps, others + numbers
            pools.append((seconds, count, numbers))
        rows = tuple(number for _, _, numbers in pools for number in numbers)
        usual = tuple(max(seconds, SHORTEST) for seconds, _, numbers in pools for _ in numbers)
        if self._usual.rows:
            self._usual = RowTable(rows, usual)
        pace = self._pace(self._recent)
        return RowTable(rows, tuple(pace * seconds for seconds in usual), self._per_key)
