"""Writes to a terminal, a pipe or a file without ever waiting for it.

A reader that stops reading (a pipe, Ctrl-S, `| less`) blocks the next write. A server that writes its log from the
event loop or the engine's thread then stops for good. Here a thread writes what is in a bounded queue. What does not
fit is dropped and counted.

Libraries write to the descriptor too: Rust does for each panic of a tokenizer, while it holds Python's interpreter. So
as long as the reader does not read, the descriptor is /dev/null for all but the thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque

MAX_BYTES = 4 * 1024 * 1024
"""Text that may wait."""
PIECE = 512
"""Bytes of a write. POSIX's least size of PIPE_BUF: a pipe that is ready takes them without waiting."""
CLOSE_SECONDS = 2.0
"""Seconds that waiting text gets at the end of the process."""


class Writer:
    """Writes texts to a file descriptor, in order."""

    def __init__(self, descriptor: int, max_bytes: int = MAX_BYTES) -> None:
        self._shared = descriptor
        self._descriptor = os.dup(descriptor)
        self._is_apart = False  # the descriptor is /dev/null
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # of what waits, and of what is being written
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Queue a text. It never waits, and never fails."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > self._max_bytes:
                self._num_dropped += 1
                return
            if self._num_dropped:
                self._add(f"({self._num_dropped} lines of the log were dropped: the reader was too slow)\n".encode())
                self._num_dropped = 0
            self._add(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlxpaged-log", daemon=True)
                self._thread.start()

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until all is written, or so long. Returns whether it is."""
        until = time.monotonic() + seconds
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, max(0.0, until - time.monotonic()))

    def _add(self, data: bytes) -> None:
        self._waiting.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            with contextlib.suppress(OSError):  # the reader has left, or the disk is full
                rest = data
                while rest:
                    self._follow_the_reader()
                    rest = rest[os.write(self._descriptor, rest[:PIECE]) :]
                self._follow_the_reader()
            with self._changed:
                self._num_bytes -= len(data)
                self._changed.notify_all()

    def _follow_the_reader(self) -> None:
        """Sets the descriptor apart if the next write would wait."""
        apart = not select.select([], [self._descriptor], [], 0)[1]
        if apart and not self._is_apart:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._shared)
            os.close(nothing)
        elif self._is_apart and not apart:
            os.dup2(self._descriptor, self._shared)
        self._is_apart = apart


class LogHandler(logging.Handler):
    """Gives lines to a Writer. They are formatted at once, where the id of their request is known."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # logging would print a traceback, and wait for that
            line = f"a line of {record.name} cannot be written: {error!r}"
        self._writer.write(f"{line}\n")

    def flush(self) -> None:
        self._writer.flush()
