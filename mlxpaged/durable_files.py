"""Writes files that survive a power failure, and that only their owner may read. Locks a directory of them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

OWNER_ONLY = 0o600
"""Mode of files. It needs no execute bit, so no umask that lets the owner work changes it."""
OWNER_ONLY_DIRECTORY = 0o700


class DirectoryInUseError(Exception):
    """Another server uses this directory."""


def flush_to_disk(descriptor: int) -> None:
    """Returns when the file, or the names in the directory, survive a power failure.

    On macOS, fsync returns when the drive has the data in its cache, which is lost in a power failure. F_FULLFSYNC
    also empties that cache; a file system that does not have it gets an fsync. Linux's fsync does both.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def flush_directory(path: Path) -> None:
    """New names in the directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yields a new file that replaces `path` once it is on the disk, or what a link leads to. After an error, `path` is
    unchanged."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
            yield file
            file.flush()
            flush_to_disk(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_directory(path.parent)


def append(path: Path, data: bytes) -> None:
    """Append to the file, which is made if it is missing. Returns when the data is on the disk. After an error, the
    file is as it was."""
    with open(path, "ab", buffering=0, opener=owner_only) as file:
        end, left = file.tell(), memoryview(data)
        try:
            while left:  # on a disk that is almost full, a part is written
                left = left[file.write(left) :]
            flush_to_disk(file.fileno())
            if end == 0:
                flush_directory(path.parent)
        except OSError:
            file.truncate(end)
            raise


def owner_only(path: str, flags: int) -> int:
    """An opener for `open`: if it makes the file, only the owner may read it."""
    return os.open(path, flags, OWNER_ONLY)


def make_private(path: Path) -> None:
    """Make a directory that only its owner may enter. One that is there loses the permissions of others, with a
    warning. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=OWNER_ONLY_DIRECTORY, exist_ok=True)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        try:
            path.chmod(mode & OWNER_ONLY_DIRECTORY)
            logger.warning("other users could enter %s (mode %o): now only you can", path, mode)
        except OSError as error:
            logger.warning("other users can enter %s (mode %o): %s", path, mode, error.strerror)


def lock(directory: Path) -> IO[bytes]:
    """Returns an open file with a lock, which ends with the process. Raises DirectoryInUseError or OSError."""
    file = open(directory / "lock", "a+b", buffering=0, opener=owner_only)  # noqa: SIM115  (closed by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        process = file.read().decode(errors="replace")
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        place = f"{directory} (process {process})" if process else str(directory)
        raise DirectoryInUseError(f"another server uses {place}") from None
    file.truncate(0)
    with contextlib.suppress(OSError):  # a full disk
        file.write(str(os.getpid()).encode())
    return file
