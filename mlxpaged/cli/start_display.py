"""Shows on standard error how far the start is: on a terminal as one line that is rewritten, elsewhere as log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

from mlxpaged.engine import Progress, Stage

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
"""Between two log lines of a stage."""
ERASE = "\x1b[2K"
"""Erases the terminal's line (ECMA-48, EL 2)."""


class StartDisplay:
    """`show` is called often. clock: seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._clock = clock
        self._shown: Progress | None = None
        self._stage: Stage | None = None
        self._logged_at = 0.0

    def show(self, progress: Progress | None) -> None:
        if progress is None or progress == self._shown:
            return
        self._shown = progress
        if self._rewrites:  # the cursor stays at the start of the line: a log line overwrites it
            self._stream.write(f"{ERASE}{progress}\r")
            self._stream.flush()
        elif progress.stage is not self._stage or self._clock() - self._logged_at >= LOG_SECONDS:
            self._stage, self._logged_at = progress.stage, self._clock()
            logger.info("%s", progress)

    def end(self) -> None:
        """Erase the line."""
        if self._rewrites and self._shown is not None:
            self._stream.write(ERASE)
            self._stream.flush()
