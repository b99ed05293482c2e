"""Shows on standard error how far the start is: on a terminal as one line that is rewritten, elsewhere as log lines.

Nothing is logged before weights are read: if the model cannot be found or served, there is one line, which says why. If
the model is downloaded first, the lines come after LOG_SECONDS.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

from mlxpaged.cli.status_line import StatusLine
from mlxpaged.progress import Progress, Stage

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Seconds between two log lines of a stage, and at most before the first one."""


class StartDisplay:
    """`show` is called often. listening: the first log line. clock: seconds."""

    def __init__(self, stream: TextIO, listening: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = StatusLine(stream)
        self._listening = listening
        self._clock = clock
        self._shown: Progress | None = None
        self._stage: Stage | None = None
        self._logged_at = clock()
        self._has_begun = False

    def show(self, progress: Progress | None) -> None:
        is_time = self._clock() - self._logged_at >= LOG_SECONDS
        if is_time or (progress is not None and (progress.total or progress.stage is not Stage.LOADING)):
            self._begin()  # the model is found
        if progress is None or progress == self._shown:
            return
        if self._line.is_terminal:
            self._line.show(str(progress))
        elif not self._has_begun:
            return
        elif progress.stage is not self._stage or is_time:
            self._stage, self._logged_at = progress.stage, self._clock()
            logger.info("%s", progress)
        self._shown = progress

    def end(self, is_loaded: bool = True) -> None:
        """Erase the line. is_loaded: False if the start has failed."""
        self._line.clear()
        if is_loaded:
            self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._line.clear()
            logger.info("%s", self._listening)
