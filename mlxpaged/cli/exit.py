"""The end of a process that has an engine."""

from __future__ import annotations

import logging
import os
import sys

from mlxpaged.engine import AsyncEngine


def exit_status(engine: AsyncEngine | None, status: int) -> int:
    """`status`, if the interpreter can be left as usual. Where the engine thread still loads, or is stuck in a step,
    the process ends here: taking the interpreter down around a thread inside MLX can abort it."""
    if engine is not None and engine.thread_is_alive:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status
