"""Runs a program in child processes, for work that may take all memory, never end, or end its process: chat templates,
the check of a grammar, and images.

A child takes a line and writes a line, and bytes may follow either. While it works, its processor time and memory are
watched, and it is ended at a limit. Nothing of this process fails with it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LAST_SECONDS = 10
"""Processor time after which the system ends a request that this process no longer watches."""
LOOK_MS = 20
"""Milliseconds between two checks of a child that works. Memory can grow by some 100 MB meanwhile."""
IDLE_MEMORY = 2**27
"""Bytes of a child that is kept. Python does not give all memory back."""
BUFFER_BYTES = 2**18
"""Bytes of a reply that a child writes before they are read. macOS has 8 KiB otherwise."""


class LimitError(Exception):
    """A child exceeded a limit, or has died. The message is the end of a sentence about what it worked on."""


@dataclass(frozen=True)
class Limits:
    """What one request may take: seconds of processor time, and bytes of the child."""

    seconds: float
    memory: int


class _Child:
    """A process of the program. `ask` may raise LimitError; the child has ended then."""

    def __init__(self, program: Path, arguments: Sequence[str], work: str, variables: Mapping[str, str]) -> None:
        """arguments: after LAST_SECONDS. work: what it does, as the end of a sentence. Raises OSError."""
        # In a session of its own, Ctrl-C does not reach it. It ends when its input does, so with this process.
        command = [sys.executable, str(program), str(LAST_SECONDS), *arguments]
        self._output, output = socket.socketpair()  # of a pipe, a read returns 64 KiB at most
        with output:
            output.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self._output.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output.fileno(),
                    cwd="/",
                    env={**os.environ, **variables},
                    start_new_session=True,
                )
            except BaseException:
                self._output.close()
                raise
        assert self._process.stdin is not None  # a pipe
        self._work, self._input = work, self._process.stdin
        self._poll = select.poll()  # `select.select` takes no descriptor above 1,023
        self._poll.register(self._output, select.POLLIN)
        if not self._output.recv(1):
            self.end()
            raise ChildProcessError(f"the process that {work} did not start")
        self._stats = psutil.Process(self._process.pid)

    def is_fit(self, memory: int) -> bool:
        """Whether it may get another request."""
        try:
            return self._process.poll() is None and self._stats.memory_info().rss < memory
        except psutil.Error:
            return False

    def ask(self, request: bytes, limits: Limits, following: Callable[[bytes], int]) -> tuple[bytes, bytearray]:
        """Returns the line of its reply, and the bytes that follow."""
        try:
            with contextlib.suppress(BrokenPipeError):  # the next read shows that it has ended
                self._input.write(request)
                self._input.flush()
            return self._read(limits, following)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()
        with contextlib.suppress(BrokenPipeError):  # it had not read all
            self._input.close()

    def _read(self, limits: Limits, following: Callable[[bytes], int]) -> tuple[bytes, bytearray]:
        started: float | None = None  # the child's processor time
        pieces: list[bytes] = []
        while not (pieces and b"\n" in pieces[-1]):
            if not self._poll.poll(LOOK_MS):
                started = self._look(started, limits)
                continue
            pieces.append(self._output.recv(2**20))
            self._require(pieces[-1])
        line, end, first = b"".join(pieces).partition(b"\n")
        line += end
        rest = bytearray(following(line))
        rest[: len(first)] = first
        view, place = memoryview(rest), len(first)
        while place < len(rest):
            # All in one call: after each, this thread waits for the interpreter lock, up to 5 ms beside a busy thread.
            count = self._output.recv_into(view[place:], 0, socket.MSG_WAITALL)
            self._require(count)
            place += count
        return line, rest

    def _require(self, received: bytes | int) -> None:
        if not received:
            raise LimitError(f"the process that {self._work} ended with status {self._process.wait()}")

    def _look(self, started: float | None, limits: Limits) -> float:
        try:
            times, memory = self._stats.cpu_times(), self._stats.memory_info().rss
        except psutil.Error:  # it has ended, as the next read will show
            return started or 0.0
        now = times.user + times.system
        if started is not None and now > started + limits.seconds:
            raise LimitError(f"it takes more than {limits.seconds:g} seconds")
        if memory > limits.memory:
            raise LimitError(f"it takes more than {limits.memory >> 20:,} MB of memory")
        return now if started is None else started


@dataclass(eq=False)
class WatchedProgram:
    """The children of a program. work: what one does, as the end of a sentence. max_idle: how many wait for work.
    variables: what a child's environment has in addition."""

    work: str
    max_idle: int
    variables: Mapping[str, str] = field(default_factory=dict)
    _idle: list[_Child] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        atexit.register(self.end)
        os.register_at_fork(after_in_child=self._idle.clear)

    def ask(
        self,
        program: Path,
        request: bytes,
        limits: Limits,
        arguments: Sequence[str] = (),
        idle_memory: int = IDLE_MEMORY,
        following: Callable[[bytes], int] = lambda line: 0,
    ) -> tuple[bytes, bytearray]:
        """Returns the line that replies to a request, and the bytes that follow it. Any thread may call it: each
        request has a child of its own. arguments: of a new child, after the seconds of the system's limit. idle_memory:
        bytes of a child that is kept. following: how many bytes follow a line. Raises LimitError, and OSError if no
        process can be started."""
        child = self._take(program, arguments, idle_memory)
        reply = child.ask(request, limits, following)
        if len(self._idle) < self.max_idle and child.is_fit(idle_memory):
            self._idle.append(child)
        else:
            child.end()
        return reply

    def end(self) -> None:
        """End the processes that wait for work."""
        while self._idle:
            self._idle.pop().end()

    def _take(self, program: Path, arguments: Sequence[str], idle_memory: int) -> _Child:
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                return _Child(program, arguments, self.work, self.variables)
            if child.is_fit(idle_memory):
                return child
            child.end()
