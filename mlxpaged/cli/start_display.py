"""Shows on standard error how far the start is: on a terminal as one line that is rewritten, elsewhere as log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

from mlxpaged.cli.status_line import StatusLine
from mlxpaged.engine import Progress, Stage

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Between two log lines of a stage."""


class StartDisplay:
    """`show` is called often. clock: seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._line = StatusLine(stream)
        self._clock = clock
        self._shown: Progress | None = None
        self._stage: Stage | None = None
        self._logged_at = 0.0

    def show(self, progress: Progress | None) -> None:
        if progress is None or progress == self._shown:
            return
        self._shown = progress
        if self._line.is_terminal:
            self._line.show(str(progress))
        elif progress.stage is not self._stage or self._clock() - self._logged_at >= LOG_SECONDS:
            self._stage, self._logged_at = progress.stage, self._clock()
            logger.info("%s", progress)

    def end(self) -> None:
        """Erase the line."""
        self._line.clear()
