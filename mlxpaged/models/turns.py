"""Lets other models take their turns while one loads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.progress import Progress, Report, Stage

Result = TypeVar("Result")

WAIT_SECONDS = 0.002
"""Seconds between two reports while a thread works. A step of another model is later by at most this."""


class Turns:
    """Reports how far a load is. In each report, other models take a turn."""

    def __init__(self, report: Report = lambda progress: None) -> None:
        self._report = report
        self._last = Progress(Stage.LOADING, 0, 0)

    def report(self, done: int, total: int) -> None:
        """Bytes of weights that are read, and of all."""
        self._show(Progress(Stage.LOADING, done, total))

    def begin(self, stage: Stage, total: int = 0) -> None:
        """total: parts of the stage, if it has some."""
        self._show(Progress(stage, 0, total))

    def step(self) -> None:
        """A part of the stage is done."""
        self._show(Progress(self._last.stage, self._last.done + 1, self._last.total))

    def take(self) -> None:
        """Report the last progress again."""
        self._report(self._last)

    def _show(self, progress: Progress) -> None:
        self._last = progress
        self._report(progress)

    def during(self, work: Callable[[], Result]) -> Result:
        """Run what does not use MLX on a thread, and take turns meanwhile. If a turn raises because the load is not
        wanted any more, the work ends by itself: a download can take an hour."""
        future = in_daemon_thread(work, "mlxpaged-load")
        while not wait([future], WAIT_SECONDS).done:
            self.take()
        return future.result()
