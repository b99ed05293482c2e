"""Remembers what ran when a process died, so that work that kills the process is not run for ever.

A journal is a file. A line is written before a piece of work begins, and one after its end. The next process that opens
the journal finds what had not ended when the one before it died. It runs that work alone, so that another death has one
cause, and gives it up after MOST_DEATHS.

A death is an end of the process before the work had ended and before `close`: a crash, a kill, also one for lack of
memory, and the end of a stalled process. If the machine was started again meanwhile, it may have lost power: the work
runs alone too, but that counts as no death.

Nothing is flushed: what a process has written stays when it dies, however it dies. The end of the machine can take the
last seconds of a journal. What they had is run again as if it had not run before.

    {"boot": "5f0e...", "deaths": {"17": [1, 1764400000]}}      what is known of earlier processes
    ["+", 1764400100, "42"]                                      it begins
    ["-", "42"]                                                  it has ended
    ["."]                                                        the process ends
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mlxpaged.durable_files import OWNER_ONLY
from mlxpaged.macos import sysctl_text

MOST_DEATHS = 2
"""Work that was running in so many deaths is not run again."""

MOST_BYTES = 64 * 1024
"""A longer journal is begun again while nothing runs."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BOOT_SESSION = b"kern.bootsessionuuid"
"""Where Linux (random(4)) and macOS (sysctl(3)) name the time since the machine's start."""


class Deaths(NamedTuple):
    """The deaths that a piece of work has seen. times: processes that died while it ran; 0 if only the machine has
    ended. last: Unix time at which it began for the last time."""

    times: int
    last: float


class Journal:
    """Holds a lock on its file. One thread at a time may use it. suspects: what had not ended when a process died, by
    its name. Names are of any characters."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, also if another process has the journal open. The file is as it was then."""
        self._path = path
        self._running: set[str] = set()
        self._size = 0
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, OWNER_ONLY)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.suspects = suspects_in(path.read_bytes())
            self._write_head()
        except BaseException:
            os.close(self._file)
            raise

    def is_suspect(self, name: str) -> bool:
        return name in self.suspects

    def has_killed(self, name: str) -> bool:
        """Whether it is not to be run again."""
        return name in self.suspects and self.suspects[name].times >= MOST_DEATHS

    def begin(self, *names: str) -> None:
        """Call it before the work is run. Raises OSError if it cannot be noted."""
        self._write(["+", time.time(), *names])
        self._running.update(names)

    def end(self, *names: str) -> None:
        """The work has ended, and was not what has killed a process. Raises nothing: if it cannot be noted, the next
        death counts for this work too."""
        for name in names:
            self.suspects.pop(name, None)
            self._running.discard(name)
        with contextlib.suppress(OSError):
            self._write(["-", *names])
            if self._file is not None and self._size > MOST_BYTES and not self._running:
                os.ftruncate(self._file, 0)
                self._size = 0
                self._write_head()

    def close(self, keep: bool = True) -> None:
        """The process ends as it should: what still runs is no suspect because of it. Suspects of before stay ones if
        `keep` is true. Nothing is noted any more. Closing twice is no error."""
        if self._file is None:
            return
        try:
            if keep and self.suspects:
                self._write(["."])
            else:
                self._path.unlink(missing_ok=True)
        except OSError:  # no room for it: rather no suspects than a wrong one
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._file)
            self._file = None

    def _write_head(self) -> None:
        self._write({"boot": boot_id(), "deaths": self.suspects})

    def _write(self, record: Any) -> None:
        """A line that is damaged, or that a full disk has cut, damages no other one."""
        if self._file is None:
            return
        data = b"\n" + json.dumps(record).encode() + b"\n"
        written = os.write(self._file, data)
        self._size += written
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def suspects_in(data: bytes) -> dict[str, Deaths]:
    """What had not ended, by the journal of a process that has. What is no record is left out."""
    boot = ""
    found, running = dict[str, Deaths](), dict[str, float]()
    for line in data.splitlines():
        match parsed(line):
            case {"boot": str() as name, "deaths": dict() as deaths}:  # of the next process
                boot = name
                found = {name: Deaths(*each) for name, each in deaths.items() if is_deaths(each)}
                running.clear()
            case ["+", int() | float() as begun, *names]:
                running |= dict.fromkeys(texts(names), begun)
            case ["-", *names]:
                for name in texts(names):
                    running.pop(name, None)
                    found.pop(name, None)
            case ["."]:
                running.clear()
    for name, begun in running.items():
        times = found[name].times if name in found else 0
        found[name] = Deaths(times + (boot == boot_id()), begun)
    return found


def texts(values: Iterable[Any]) -> list[str]:
    return [each for each in values if isinstance(each, str)]


def is_deaths(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, (int, float)) for each in value)


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@functools.cache
def boot_id() -> str:
    """A name for the time since the machine was started. Empty if the system gives none."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return sysctl_text(BOOT_SESSION)
