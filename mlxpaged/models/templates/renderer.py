"""Renders chat templates in child processes, because a template is a program that comes with the model.

Jinja's sandbox keeps a template from files and from Python's own objects. It does not keep it from looping 10^15 times
or from making 10^9 characters, nor from holding the interpreter's lock in one long call. A child (`program.py`) renders
one template at a time. While it does, its processor time and memory are watched, and it is ended at a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

PROGRAM = Path(__file__).with_name("program.py")
SECONDS = 5.0
"""Processor time of one rendering. One with 120 messages and 200,000 characters takes 10 ms."""
LAST_SECONDS = 10
"""Processor time after which the system ends a rendering that this process no longer watches."""
MAX_MEMORY = 2**30
"""Bytes of a child. It begins with 20 MB; a conversation of a million tokens takes about 100 MB."""
MAX_SOURCE = 2**18
"""Characters of a template. Those of known models have some thousand."""
LOOK_MS = 20
"""Milliseconds between two checks of a child that renders. Memory can grow by some 100 MB meanwhile."""
MAX_IDLE = 4
"""Children that wait for work. There is one for each model that renders at the same time."""
IDLE_MEMORY = 2**27
"""Bytes of a child that is kept. Python does not give all memory back."""


class TemplateLimitError(Exception):
    """A template exceeds a limit of this module. The message is the end of a sentence about the template."""


class TemplateError(Exception):
    """What a template, or Jinja at its sight, raised."""


class _Child:
    """A process that renders. `ask` may raise TemplateLimitError; the child has ended then."""

    def __init__(self) -> None:
        """Raises OSError."""
        # In a session of its own, Ctrl-C does not reach it. It ends when its input does, so with this process.
        command = [sys.executable, str(PROGRAM), str(LAST_SECONDS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", start_new_session=True
        )
        assert self._process.stdin is not None  # a pipe, as the output
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._poll = select.poll()  # `select.select` takes no descriptor above 1,023
        self._poll.register(self._output, select.POLLIN)
        if not self._output.readline():
            self.end()
            raise ChildProcessError("the process that renders chat templates did not start")
        self._stats = psutil.Process(self._process.pid)

    @property
    def is_fit(self) -> bool:
        """Whether it may get another request."""
        try:
            return self._process.poll() is None and self._stats.memory_info().rss < IDLE_MEMORY
        except psutil.Error:
            return False

    def ask(self, request: bytes) -> bytes:
        """Returns its reply to a line."""
        try:
            self._input.write(request)
            self._input.flush()
            return self._read_line()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):  # it had not read all
            self._input.close()

    def _read_line(self) -> bytes:
        started: float | None = None  # the child's processor time
        pieces: list[bytes] = []
        while not (pieces and pieces[-1].endswith(b"\n")):
            if not self._poll.poll(LOOK_MS):
                started = self._look(started)
                continue
            piece = os.read(self._output.fileno(), 2**20)
            if not piece:
                raise TemplateLimitError(f"the process that renders it ended with status {self._process.wait()}")
            pieces.append(piece)
        return b"".join(pieces)

    def _look(self, started: float | None) -> float:
        try:
            times, memory = self._stats.cpu_times(), self._stats.memory_info().rss
        except psutil.Error:  # it has ended, as the next read will show
            return started or 0.0
        now = times.user + times.system
        if started is not None and now > started + SECONDS:
            raise TemplateLimitError(f"it takes more than {SECONDS:g} seconds")
        if memory > MAX_MEMORY:
            raise TemplateLimitError(f"it takes more than {MAX_MEMORY >> 20:,} MB of memory")
        return now if started is None else started


_idle: list[_Child] = []


@atexit.register
def end_children() -> None:
    """End the processes that wait for work."""
    while _idle:
        _idle.pop().end()


os.register_at_fork(after_in_child=_idle.clear)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Returns the text that a template makes of its variables, values that JSON has. Any thread may call it. Raises
    TemplateError, TemplateLimitError, and OSError if no process can be started."""
    return str(_ask({"source": source, "variables": variables})["text"])


def variables_of(source: str) -> frozenset[str]:
    """Returns the names that a template looks up and does not set itself. Raises as `render` does."""
    return frozenset(_ask({"source": source})["names"])


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    if len(request["source"]) > MAX_SOURCE:
        raise TemplateLimitError(f"it has more than {MAX_SOURCE:,} characters")
    line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    child = _take()
    reply: dict[str, Any] = json.loads(child.ask(line).decode("utf-8", "surrogatepass"))
    if len(_idle) < MAX_IDLE and child.is_fit:
        _idle.append(child)
    else:
        child.end()
    if "limit" in reply:
        raise TemplateLimitError(reply["limit"])
    if "error" in reply:
        raise TemplateError(reply["error"])
    return reply


def _take() -> _Child:
    while True:
        try:
            child = _idle.pop()
        except IndexError:
            return _Child()
        if child.is_fit:
            return child
        child.end()
