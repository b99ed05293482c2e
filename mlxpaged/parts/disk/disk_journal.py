"""Notes which blocks of a DiskStore are being read, and that its index is being opened. On a disk without room nothing
is noted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from mlxpaged.journal import Journal
from mlxpaged.parts.disk.disk_index import Name

logger = logging.getLogger(__name__)

FILE = "reading"
INDEX = "index"
"""The name of the index in the journal. Blocks have names of hexadecimal digits."""


class DiskJournal:
    """The process that uses it has a lock on the directory."""

    def __init__(self, directory: Path) -> None:
        self._journal: Journal | None = None
        try:
            self._journal = Journal(directory / FILE)
        except OSError as error:
            logger.warning("what is read from %s is not noted: %s", directory, error)

    @property
    def index_has_killed(self) -> bool:
        return self._has_killed(INDEX)

    def killers(self, blocks: Iterable[Name]) -> list[Name]:
        """Those that were being read in two deaths."""
        return [name for name in blocks if self._has_killed(noted(name))]

    def begin_index(self) -> None:
        self._begin(INDEX)

    def end_index(self) -> None:
        self._end(INDEX)

    def begin(self, blocks: Iterable[Name]) -> None:
        self._begin(*map(noted, blocks))

    def end(self, blocks: Iterable[Name]) -> None:
        self._end(*map(noted, blocks))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _has_killed(self, name: str) -> bool:
        return self._journal is not None and self._journal.has_killed(name)

    def _begin(self, *names: str) -> None:
        if self._journal is not None:
            with contextlib.suppress(OSError):
                self._journal.begin(*names)

    def _end(self, *names: str) -> None:
        if self._journal is not None:
            self._journal.end(*names)


def noted(name: Name) -> str:
    return f"{name.key.hex()}-{name.part}"
