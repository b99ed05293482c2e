"""The end of a process that has an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from mlxpaged.engine import AsyncEngine


def exit_status(engine: AsyncEngine | None, status: int) -> int:
    """`status`, where there is no engine. With one, the process ends here: its thread may still load, or be stuck in a
    step, and one that Python takes for ended still has MLX's compiled functions to drop, for which it needs the
    interpreter. To take the interpreter down meanwhile aborts the process: a third of short runs ended with 134."""
    if engine is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads it any more
                stream.flush()
        os._exit(status)
    return status
