"""The index of a DiskStore in SQLite: which block is where, and what survives the process beside it."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mlxpaged.durable_files import OWNER_ONLY

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the files. Those of another version are deleted."""

INDEX, SEGMENT = "index.sqlite3", ".segment"

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
CREATE TABLE segments (id INTEGER PRIMARY KEY, model TEXT, used INTEGER);
CREATE TABLE blocks (key BLOB, part INTEGER, segment INTEGER, start INTEGER, length INTEGER, checksum BLOB,
                     PRIMARY KEY (key, part)) WITHOUT ROWID;
CREATE INDEX blocks_of_segment ON blocks (segment);
"""


class Name(NamedTuple):
    """key: of the prefix cache. part: the cache group, whose block has a part of the KV of these tokens."""

    key: bytes
    part: int


class Place(NamedTuple):
    """Where a block is. start, length: bytes of the segment's file."""

    segment: int
    start: int
    length: int
    checksum: bytes


FAILURES = (OSError, sqlite3.Error, ValueError)
"""What the index raises. ValueError: a message of SQLite has a name from a damaged file, which is no text."""


class DiskIndex:
    """One thread uses it at a time. All methods raise FAILURES. What was not committed is lost with the process.

    An index that is damaged or has another format is deleted at the start, with all segments. segments: number and
    model of each, the least recently used first. blocks, facts: all that was committed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._open(directory / INDEX)
        except (sqlite3.Error, ValueError) as error:
            delete_prefixes(directory, str(error))
            self._open(directory / INDEX)

    def _open(self, path: Path) -> None:
        self._index = index = connect(path)
        try:
            rows = index.execute("SELECT id, model FROM segments ORDER BY used, id").fetchall()
            self.segments = [(number, str(model)) for number, model in rows]
            self.blocks = [
                (Name(key, part), Place(*place)) for key, part, *place in index.execute("SELECT * FROM blocks")
            ]
            facts = index.execute("SELECT name, value FROM facts").fetchall()
            self.facts = {name: value for name, value in facts if isinstance(value, int)}
        except BaseException:
            index.close()
            raise

    def add_segment(self, number: int, model: str) -> None:
        self._index.execute("INSERT OR REPLACE INTO segments VALUES (?, ?, 0)", (number, model))

    def delete_segment(self, number: int) -> None:
        self._index.execute("DELETE FROM blocks WHERE segment = ?", (number,))
        self._index.execute("DELETE FROM segments WHERE id = ?", (number,))

    def add(self, blocks: Mapping[Name, Place]) -> None:
        rows = [(*name, *place) for name, place in blocks.items()]
        self._index.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?, ?)", rows)

    def delete(self, name: Name) -> None:
        self._index.execute("DELETE FROM blocks WHERE key = ? AND part = ?", name)

    def commit(self, used: Iterable[tuple[int, int]], facts: Mapping[str, int]) -> None:
        """used: number of a segment, and when it was used last."""
        self._index.executemany("UPDATE segments SET used = ?2 WHERE id = ?1", used)
        self._index.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        self._index.commit()

    def close(self) -> None:
        self._index.close()


def delete_prefixes(directory: Path, reason: str) -> None:
    """Raises OSError."""
    logger.warning("the prefixes in %s are deleted: %s", directory, reason)
    for path in [*directory.glob(f"*{SEGMENT}"), *directory.glob(f"{INDEX}*")]:
        path.unlink(missing_ok=True)


def connect(path: Path) -> sqlite3.Connection:
    """Raises FAILURES, also if the index has another format."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))  # SQLite gives its other files the same mode
    index = sqlite3.connect(path, check_same_thread=False)
    try:
        index.execute("PRAGMA locking_mode = EXCLUSIVE")  # no mapped file, whose truncation ends the process
        [(version,)] = index.execute("PRAGMA user_version")
        if not version and not index.execute("SELECT name FROM sqlite_master").fetchall():
            index.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif version != FORMAT:
            raise sqlite3.DatabaseError(f"they have format {version}, and this server has {FORMAT}")
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = NORMAL")
        index.execute("PRAGMA wal_autocheckpoint = 200")  # pages: the log has at most about a megabyte
        [(found,)] = index.execute("PRAGMA quick_check(1)")
        if found != "ok":
            raise sqlite3.DatabaseError(f"the index is damaged: {found}")
    except BaseException:
        index.close()
        raise
    return index


def is_sound(name: Name, place: Place, sizes: Mapping[int, int]) -> bool:
    """Whether it can have been written: a damaged index may have anything. sizes: bytes of each segment."""
    if not (isinstance(name.key, bytes) and isinstance(place.checksum, bytes) and name.part in range(256)):
        return False
    numbers = place.segment, place.start, place.length
    if not all(isinstance(each, int) for each in numbers):
        return False
    return 0 <= place.start < place.start + place.length <= sizes.get(place.segment, 0)
