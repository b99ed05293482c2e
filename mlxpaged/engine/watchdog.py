"""Notices work of the engine thread that does not end. Its thread waits neither for that one nor for the event loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mlxpaged.core.engine.stall import Stall, StepSize, Work
from mlxpaged.engine.engine_thread import Activity, EngineThread

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""Seconds between two checks of what the engine thread does."""

LEAST_SECONDS = 30.0
"""The shortest default limit of a step: kernels may be compiled in it, or the machine may be short of memory."""

FACTOR = 20.0
"""The default limit of a step is this many times its estimated time."""

UNKNOWN_SECONDS = 300.0
"""The default limit of a step whose time cannot be estimated yet: the first prompts of a large model."""

LOAD_SECONDS = 900.0
"""The limit of a load between two reports. A download reports all the time, and the weights after every array."""

GRACE_SECONDS = 2.0
"""Seconds that clients get to receive their errors before the process ends."""

STALLED_STATUS = 70
"""The exit status of a server that ends because it is stalled: EX_SOFTWARE of sysexits.h."""


@dataclass(frozen=True)
class StallLimits:
    """step_timeout: seconds for a step; inf for no limit; None for a multiple of its estimated time. exits: whether a
    stalled process ends."""

    step_timeout: float | None = None
    exits: bool = False

    def limit(self, work: Work, size: StepSize | None) -> float:
        """Seconds."""
        if work is Work.LOAD:
            return max(LOAD_SECONDS, self.step_timeout or 0.0)
        if self.step_timeout is not None:
            return self.step_timeout
        if size is None or size.seconds is None:
            return UNKNOWN_SECONDS
        return max(LEAST_SECONDS, FACTOR * size.seconds)


class Watchdog(threading.Thread):
    """Looks every TICK_SECONDS. At a stall the engine thread's `stall` is set, `on_stall` is called on this thread, and
    the stacks of all threads go to the log. The stall is over when its work ends after all."""

    def __init__(
        self,
        watched: EngineThread,
        limits: StallLimits,
        clock: Callable[[], float],
        on_stall: Callable[[Stall], None],
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """clock: seconds, as the engine thread's."""
        super().__init__(name="mlxpaged-watchdog", daemon=True)
        self._watched = watched
        self._limits = limits
        self._clock = clock
        self._on_stall = on_stall
        self._end_process = end_process
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def run(self) -> None:
        stalled: Activity | None = None
        while not self._ended.wait(TICK_SECONDS):
            now, activity = self._clock(), self._watched.activity
            if stalled is not None and activity is not stalled:
                logger.warning("the stall is over after %.0f s; the server takes requests again", now - stalled.since)
                stalled = None
            if activity is not None and activity is not stalled and self._check(activity, now):
                stalled = activity

    def _check(self, activity: Activity, now: float) -> bool:
        """Returns whether the activity is stalled, after everyone was told."""
        size = activity.size()
        limit = self._limits.limit(activity.work, size)
        if now - activity.since < limit:
            return False
        model = None if activity.slot is None else activity.slot.name
        stall = Stall(activity.work, model, size, activity.since, limit)
        self._watched.note_stall(activity, stall)
        self._on_stall(stall)
        if self._limits.exits:  # on a thread, because the log may be what everything waits for
            threading.Thread(target=self._end_if_stalled, args=(activity,), name="mlxpaged-exit", daemon=True).start()
        ends = f"; the process ends in {GRACE_SECONDS:.0f} s" if self._limits.exits else ""
        logger.critical("%s%s; the stacks of all threads follow", stall, ends)
        dump_stacks()
        return True

    def _end_if_stalled(self, activity: Activity) -> None:
        """End the process, unless the stall is over by then."""
        self._ended.wait(GRACE_SECONDS)
        if self._watched.activity is activity and not self._ended.is_set():
            self._end_process(STALLED_STATUS)


def dump_stacks() -> None:
    """Write the stacks of all threads to the log."""
    with suppress(OSError), tempfile.TemporaryFile() as file:  # the disk may be full
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        for line in file.read().decode(errors="replace").splitlines():
            logger.critical("%s", line)
