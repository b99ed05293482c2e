"""The running servers of this user, each a file in ~/.mlxpaged/run: its process and its address.

A server holds a lock on its file until it ends, however it ends. So a file without a lock is left over, and its process
id, which another process may have by now, is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxpaged.cli.os_errors import sentence
from mlxpaged.durable_files import make_private, owner_only

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningServer:
    pid: int
    url: str
    """The address at which clients on this machine reach it."""
    shared: bool
    """False for a server that another command has started for itself and ends again."""
    started: float
    """Unix time."""


def directory() -> Path:
    return Path.home() / ".mlxpaged" / "run"


def file_of(pid: int) -> Path:
    return directory() / f"{pid}.json"


@contextlib.contextmanager
def registered(url: str, shared: bool) -> Iterator[None]:
    """Other commands find this process as a server, until the end of the context. If the file cannot be written, a
    shared server runs all the same. Another one ends: the command that has started it would wait for the file."""
    server = RunningServer(os.getpid(), url, shared, time.time())
    path = file_of(server.pid)
    with contextlib.ExitStack() as stack:
        try:
            make_private(path.parent)
            new = path.with_suffix(".new")
            file = stack.enter_context(open(new, "w", opener=owner_only))
            stack.callback(path.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)  # before the file has its name: it is never found without a lock
            json.dump(asdict(server), file)
            file.flush()
            new.replace(path)
        except OSError as error:
            if not shared:
                raise SystemExit(f"mlxpaged: the file of a new server cannot be written: {sentence(error)}") from None
            logger.warning("other commands cannot find this server: %s", error)
        yield


def running_servers() -> list[RunningServer]:
    """Returns those that run now, the newest first. Deletes files that are left over."""
    try:
        paths = list(directory().glob("*.json"))
    except OSError:  # the home directory is another user's
        return []
    found = [server for path in paths if (server := read(path)) is not None]
    return sorted(found, key=lambda server: server.started, reverse=True)


def server_of(pid: int) -> RunningServer | None:
    """Returns None if the process does not serve, or not yet."""
    return read(file_of(pid))


def read(path: Path) -> RunningServer | None:
    try:
        with path.open() as file:
            if not is_locked(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            return RunningServer(**json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
