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
    """start: seconds of as many rows at the start, or 1.0 if none were timed."""

    rows: int
    keys: int
    seconds: float
    start: float


class RowTimes:
    """The latest steps by their rows. start: seconds of steps of so many rows with short contexts, the pace of which
    is 1."""

    def __init__(self, start: Mapping[int, float]) -> None:
        self._latest = defaultdict[int, deque[tuple[TimedStep, ListOf[TimedStep]]]](lambda: deque(maxlen=ROW_SAMPLES))
        """The latest steps by bucket, with those that tell the pace of each."""
        self._relative = defaultdict[int, deque[float]](lambda: deque(maxlen=ROW_SAMPLES))
        """Their seconds at a pace of 1, without keys."""
        self._recent = deque[TimedStep](maxlen=PACE_STEPS)
        self._start = RowTable(tuple(sorted(start)), tuple(start[rows] for rows in sorted(start)))
        self._per_key = 0.0
        for rows, seconds in start.items():
            self.observe(rows, rows, seconds)
        self._recent.clear()  # a server is not as slow as it was when nothing else ran

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """keys: that its rows attend to together."""
        step = TimedStep(rows, keys, seconds, self._start.of(rows) if self._start.rows else 1.0)
        if self._start.rows:
            self._recent.append(step)
        index = bucket(rows)
        self._latest[index].append((step, tuple(self._recent)))
        self._relative[index].append(self._without_keys(step) / self._pace(self._recent))

    def learn_keys(self, per_key: float) -> None:
        """per_key: seconds of each key. What is nearly known changes nothing."""
        if abs(per_key - self._per_key) > KEYS_CHANGED * self._per_key:
            self._per_key = per_key
            for index, steps in self._latest.items():
                self._relative[index].extend(self._without_keys(step) / self._pace(recent) for step, recent in steps)

    def _without_keys(self, step: TimedStep) -> float:
        return step.seconds - self._per_key * step.keys

    def _pace(self, steps: Collection[TimedStep]) -> float:
        """How many times as long as at the start these steps have taken."""
        return max(median(self._without_keys(step) / step.start for step in steps), LEAST_PACE) if steps else 1.0

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
        pace, rows_in_order, seconds_in_order = self._pace(self._recent), list[float](), list[float]()
        for seconds, _, numbers in pools:
            rows_in_order += numbers
            seconds_in_order += [max(pace * seconds, SHORTEST)] * len(numbers)
        return RowTable(tuple(rows_in_order), tuple(seconds_in_order), self._per_key)
