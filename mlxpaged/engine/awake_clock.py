"""The clock of a server: the seconds in which its process could run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LONGEST_GAP = 2.0
"""Seconds. The watchdog reads the clock four times a second, so after a longer gap between two readings no thread of
the process has run in between."""

WITHOUT_SLEEP = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)
"""A clock that stands still while the machine sleeps. On Linux that is CLOCK_MONOTONIC. On macOS CLOCK_MONOTONIC goes
on in sleep, and so does uvloop's clock; CLOCK_UPTIME_RAW does not. `time.monotonic` is mach_absolute_time() there,
which does not either, but Python may change that (cpython issue 86273)."""


def seconds_without_sleep() -> float:
    return time.clock_gettime(WITHOUT_SLEEP)


class AwakeClock:
    """Neither the sleep of the machine nor the time in which the process was stopped counts (SIGSTOP, a frozen
    container): no deadline passes in it. Some thread must read it at least every LONGEST_GAP seconds.

    read: seconds. A step back of that clock, which CLOCK_UPTIME_RAW can make after a long sleep, counts as no time.
    """

    def __init__(self, read: Callable[[], float] = seconds_without_sleep) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last: float | None = None  # the latest reading
        self._left_out = 0.0

    def __call__(self) -> float:
        gap = 0.0
        with self._lock:  # otherwise a thread that was stopped between its two lines would count the gap again
            now = self._read()
            if self._last is not None and not 0 <= now - self._last <= LONGEST_GAP:
                gap = now - self._last
                self._left_out += gap
            self._last = now
            seconds = now - self._left_out
        if gap > 0:
            logger.info("the process did not run for %.1f s; deadlines are later by as much", gap)
        return seconds
