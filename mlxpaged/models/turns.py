"""Lets other models take their turns while one loads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from mlxpaged.attention.self_check import ReportAmount
from mlxpaged.daemon_thread import in_daemon_thread

Result = TypeVar("Result")

WAIT_SECONDS = 0.002
"""Seconds between two reports while a thread works. A step of another model is later by at most this."""


class Turns:
    """Reports how far a load is. In each report, other models take a turn."""

    def __init__(self, report: ReportAmount = lambda done, total: None) -> None:
        self._report = report
        self._amounts = (0, 0)

    def report(self, done: int, total: int) -> None:
        self._amounts = (done, total)
        self._report(done, total)

    def take(self) -> None:
        """Report the last amounts again."""
        self._report(*self._amounts)

    def during(self, work: Callable[[], Result]) -> Result:
        """Run what does not use MLX on a thread, and take turns meanwhile. If a turn raises because the load is not
        wanted any more, the work ends by itself: a download can take an hour."""
        future = in_daemon_thread(work, "mlxpaged-load")
        while not wait([future], WAIT_SECONDS).done:
            self.take()
        return future.result()
