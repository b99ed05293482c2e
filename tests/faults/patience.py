"""How long a client waits for an answer that may hang. On a busy machine it waits longer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

LOOK_SECONDS = 0.5
TICKS = os.sysconf("SC_CLK_TCK")


class Delays:
    """Sums up the seconds in which a thread of a process had work but no core. A thread that hangs has no work. Linux
    tells them (Documentation/scheduler/sched-stats.rst); elsewhere they are 0."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._of_thread: dict[str, float] = {}
        self._looked_at = -math.inf

    def of(self, pid: int) -> float:
        """The sum up to now. pid: it may change from call to call."""
        if time.monotonic() >= self._looked_at + LOOK_SECONDS:
            self._looked_at = time.monotonic()
            present = thread_delays(pid)
            self._seconds += max((now - self._of_thread.get(thread, 0.0) for thread, now in present.items()), default=0)
            self._of_thread |= present
        return self._seconds


def thread_delays(pid: int) -> dict[str, float]:
    """Seconds by thread."""
    found = {}
    with contextlib.suppress(OSError):  # the process or a thread has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return found


def processor_seconds(pid: int) -> float:
    """That a process and its children have used, those that have ended included. Linux counts hundredths."""
    with contextlib.suppress(OSError):  # it has just ended
        return (sum(ticks_of(pid)) + sum(sum(ticks_of(each)[:2]) for each in children_of(pid))) / TICKS
    return 0.0


def ticks_of(pid: int) -> list[int]:
    """utime, stime, and those of its children that it has waited for (proc_pid_stat(5)); nothing if it has ended."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]
    return []


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


async def within(seconds: float, delay: Callable[[], float], awaitable: Awaitable[Result]) -> Result:
    """Raises asyncio.TimeoutError after so many seconds, to which the growth of `delay` is added."""
    task = asyncio.ensure_future(awaitable)
    until = time.monotonic() + seconds - delay()
    try:
        while (left := until + delay() - time.monotonic()) > 0:
            await asyncio.wait([task], timeout=left)
            if task.done():
                return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()
