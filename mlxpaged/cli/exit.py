"""Ends a process that has an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import sys


def exit_status(status: int, has_engine: bool = True) -> int:
    """Returns `status` if there is no engine; otherwise ends the process here. The engine thread may still load or run
    a step, and after its end MLX still frees compiled functions with the interpreter's help. If Python shuts down
    meanwhile, the process aborts: a third of short runs ended with status 134. Python would also wait for downloads."""
    logging.shutdown()  # a thread writes the log: it gets the time to write the last lines
    if has_engine:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader has left
                stream.flush()
        os._exit(status)
    return status
