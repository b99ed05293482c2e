"""Keeps cached blocks in files, so that prefixes outlive the process. It knows keys, tokens and bytes, and no model.

A directory has segments, each of many blocks of one model, and an index. A segment is appended to until it is full, and
deleted whole: the one whose blocks were used least recently. So no block is ever copied, and nothing is written but
what is to be stored. A block has a checksum, which includes its key, its predecessor's and its tokens. A torn or
damaged block is not found, so nothing waits until data is on the disk.

One thread does all reading and writing. The engine thread asks a dict which blocks there are.

A journal has the blocks that are being read, until the caller has used them. If processes die twice meanwhile, the next
one does not find them. If they die twice while the index is opened, all is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from mlxpaged.durable_files import OWNER_ONLY, OWNER_ONLY_DIRECTORY, DirectoryInUseError, lock
from mlxpaged.parts.disk.disk_index import (
    FAILURES,
    SEGMENT,
    DiskIndex,
    Name,
    Place,
    delete_prefixes,
    is_sound,
)
from mlxpaged.parts.disk.disk_journal import DiskJournal
from mlxpaged.parts.disk.disk_records import Data, ModelUsage, Segment, StoredBlock, StoreStats

logger = logging.getLogger(__name__)

RANK_DIRECTORY = "rank-{}-of-{}"
"""The directory of a rank of a model that several compute together, in the one that they were given."""

SEGMENT_BYTES = 64 * 2**20
"""Bytes of a full segment; less in a small store, which has at least SEGMENTS of them."""
SEGMENTS = 16

READ_BYTES = 8 * 2**20
"""Neighbouring blocks are read at once, up to so many bytes."""

MAX_PENDING_BYTES = 256 * 2**20
"""Blocks that wait for the writer. Further ones are not stored: the disk is too slow for them."""

READ_RATE = 5e8
"""Bytes a second that a disk is expected to give. It counts as much as what was read in the first second."""

DAY_SECONDS = 86_400
CLOSE_SECONDS = 10.0
"""Time that the last blocks have to be written when a store is closed."""

Result = TypeVar("Result")


class StoreError(Exception):
    """The directory cannot be used. The message says why."""


class DiskStore:
    """budget, write_budget: bytes of all segments, and bytes that are written a day. clock: Unix time. Raises
    StoreError if the directory cannot be used, or another process uses it.

    Errors of the disk raise nothing later: a block that cannot be read is not found, and after a write that failed,
    nothing is written.
    """

    def __init__(self, directory: Path, budget: int, write_budget: int, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._budget, self._write_budget, self._clock = budget, write_budget, clock
        self._segment_bytes = max(1, min(SEGMENT_BYTES, budget // SEGMENTS))
        self._places: dict[Name, Place] = {}
        self._segments: dict[int, Segment] = {}
        self._open: dict[str, tuple[int, IO[bytes]]] = {}  # by model: the segment that is appended to
        self._next = 1
        self._used: set[int] = set()  # segments whose `used` the index does not have yet
        self._uses = self._damaged = self._day = self._written = self._written_total = 0
        self._stopped, self._said_on = "", -1
        self._bytes_read, self._read_seconds = READ_RATE, 1.0
        self._reads: deque[Callable[[], None]] = deque()  # they go before other jobs
        self._jobs: deque[Callable[[], None]] = deque()
        self._pending: set[Name] = set()
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._is_closing = False
        self._lock = take_lock(directory)
        self._journal = DiskJournal(directory)
        try:
            if self._journal.index_has_killed:
                delete_prefixes(directory, "two processes died while they opened the index")
            self._journal.begin_index()
            self._index = DiskIndex(directory)
            self._read_index()
            self._journal.end_index()
            self._drop_killers()
        except BaseException as error:
            self._journal.close()
            self._lock.close()
            if isinstance(error, FAILURES):
                raise StoreError(f"{directory} cannot be used: {error}") from error
            raise
        self._thread = threading.Thread(target=self._run, name="mlxpaged-disk", daemon=True)
        self._thread.start()

    # -- on any thread -------------------------------------------------------------------------------------------

    def __contains__(self, name: Name) -> bool:
        """Whether a block is stored, or will be soon."""
        return name in self._places or name in self._pending

    def can_read(self, name: Name) -> bool:
        return name in self._places

    @property
    def room(self) -> int:
        """Bytes that `write` takes now."""
        return 0 if self._stopped else max(0, min(MAX_PENDING_BYTES, self._left_today()) - self._pending_bytes)

    @property
    def read_rate(self) -> float:
        """Bytes a second that reading and checking took so far."""
        return self._bytes_read / self._read_seconds

    def write(self, model: str, blocks: Iterable[tuple[StoredBlock, Data]]) -> None:
        """Store blocks soon, as far as there is room for them. model: the name that `usage` shows."""
        with self._changed:
            taken = []
            for content, data in blocks:
                if content.name not in self and data.nbytes <= self.room:
                    taken.append((content, data))
                    self._pending.add(content.name)
                    self._pending_bytes += data.nbytes
        if taken:
            self._ask(self._jobs, partial(self._write, model, taken))

    def read(self, wanted: Sequence[StoredBlock]) -> Future[list[Data | None]]:
        """The data of each block, or None if it is not stored or is damaged. `end_reading` says that it was used."""
        return self._ask(self._reads, partial(self._read, wanted))

    def end_reading(self, wanted: Sequence[StoredBlock]) -> None:
        """Blocks that were read have been used, or are not needed: the process did not die of them."""
        self._ask(self._jobs, lambda: self._journal.end(each.name for each in wanted))

    def flush(self, timeout: float = CLOSE_SECONDS, pending_bytes: int = 0) -> bool:
        """Wait until at most `pending_bytes` wait for the writer. Returns whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending_bytes <= pending_bytes, timeout)

    def clear(self, model: str | None = None) -> Future[int]:
        """Delete what a model has, or all models. The result is the number of blocks."""
        return self._ask(self._jobs, partial(self._clear, model))

    def close(self) -> None:
        """Write what waits, and let another process use the directory. Closing twice is no error."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def stats(self) -> StoreStats:
        written = self._write_budget - self._left_today()
        sizes = self._size(), self._budget, written, self._write_budget
        return StoreStats(len(self._places), *sizes, self._damaged, self._stopped, self._written_total)

    def usage(self) -> list[ModelUsage]:
        """What each model has, the largest first."""
        found: dict[str, ModelUsage] = {}
        for segment in list(self._segments.values()):
            _, blocks, size = found.get(segment.model, ModelUsage(segment.model, 0, 0))
            found[segment.model] = ModelUsage(segment.model, blocks + len(segment.names), size + segment.size)
        return sorted(found.values(), key=lambda each: -each.size)

    def _ask(self, jobs: deque[Callable[[], None]], function: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                logger.exception("the prefixes in %s", self.directory)
                future.set_exception(error)

        with self._changed:
            jobs.append(run)
            self._changed.notify_all()
        return future

    def _size(self) -> int:
        return sum(segment.size for segment in list(self._segments.values()))

    def _left_today(self) -> int:
        """Bytes that may be written today. A clock that is set back does not give another day."""
        self._day, is_later = min(self._day, self._today()), self._today() > self._day
        return max(0, self._write_budget - (0 if is_later else self._written))

    def _today(self) -> int:
        return int(self._clock() // DAY_SECONDS)

    # -- on the store's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._jobs or self._is_closing)
                jobs = self._reads or self._jobs
                job = jobs.popleft() if jobs else None
            if job is None:
                break
            job()
        with contextlib.suppress(*FAILURES):
            self._commit()
            for model in list(self._open):
                self._seal(model)
            self._index.close()
        self._journal.close()
        self._lock.close()

    def _stop(self, error: Exception) -> None:
        self._stopped = str(error) or type(error).__name__
        logger.warning("no more prefixes are written to %s: %s", self.directory, error)
        for model in list(self._open):
            with contextlib.suppress(OSError):  # what the file had not written yet
                self._seal(model)

    def _commit(self) -> None:
        if not self._stopped:
            used = [(number, self._segments[number].used) for number in self._used & self._segments.keys()]
            self._index.commit(used, {"day": self._day, "written": self._written})
            self._used.clear()

    def _use(self, number: int) -> None:
        self._uses += 1
        self._segments[number].used = self._uses
        self._used.add(number)

    def _write(self, model: str, blocks: Sequence[tuple[StoredBlock, Data]]) -> None:
        try:
            if not self._stopped:
                self._append(model, blocks)
        except FAILURES as error:
            self._stop(error)
        finally:
            with self._changed:
                self._pending.difference_update(content.name for content, _ in blocks)
                self._pending_bytes -= sum(data.nbytes for _, data in blocks)
                self._changed.notify_all()

    def _append(self, model: str, blocks: Sequence[tuple[StoredBlock, Data]]) -> None:
        left, today = self._left_today(), self._today()
        self._written, self._day = self._write_budget - left, today
        new: dict[Name, Place] = {}
        for content, data in blocks:
            header = content.header
            length = len(header) + data.nbytes
            if length > self._left_today():
                if self._said_on != today:
                    logger.info("today's %.1f GB of writes of prefixes are used up", self._write_budget / 1e9)
                self._said_on = today
                break
            if length > self._budget:
                continue
            number, file = self._segment_for(model, length)
            segment = self._segments[number]
            file.write(header)
            file.write(data)
            new[content.name] = Place(number, segment.size, length, content.checksum(header, data))
            segment.size += length
            segment.names.add(content.name)
            self._written += length
            self._written_total += length
            self._use(number)
        for _, file in self._open.values():
            file.flush()
        new = {name: place for name, place in new.items() if place.segment in self._segments}
        self._index.add(new)
        self._commit()
        self._places.update(new)

    def _segment_for(self, model: str, length: int) -> tuple[int, IO[bytes]]:
        """The segment that the next block of a model is appended to, and its file."""
        if model in self._open:
            size = self._segments[self._open[model][0]].size
            if size and size + length > self._segment_bytes:
                self._seal(model)
        while self._size() + length > self._budget:
            own = self._open.get(model, (0,))[0]
            self._delete(min(self._segments, key=lambda number: (number == own, self._segments[number].used)))
        if model not in self._open:
            number, self._next = self._next, self._next + 1
            descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
            self._segments[number], self._open[model] = Segment(model), (number, os.fdopen(descriptor, "wb"))
            self._index.add_segment(number, model)
        return self._open[model]

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08}{SEGMENT}"

    def _seal(self, model: str) -> None:
        """Append no more to the segment of a model."""
        self._open.pop(model)[1].close()

    def _delete(self, number: int) -> None:
        segment = self._segments.pop(number)
        if self._open.get(segment.model, (0,))[0] == number:
            self._seal(segment.model)
        for name in segment.names:
            self._places.pop(name, None)
        self._path(number).unlink(missing_ok=True)
        self._index.delete_segment(number)

    def _clear(self, model: str | None) -> int:
        before = len(self._places)
        try:
            for number in [number for number, each in self._segments.items() if model in (None, each.model)]:
                self._delete(number)
            self._commit()
        except FAILURES as error:
            self._stop(error)
        return before - len(self._places)

    def _drop_killers(self) -> None:
        killers = self._journal.killers(self._places)
        if killers:
            logger.warning("%s: two processes died while they read %d blocks: dropped", self.directory, len(killers))
            for name in killers:
                self._forget(name)
            self._commit()
            self._journal.end(killers)

    def _read(self, wanted: Sequence[StoredBlock]) -> list[Data | None]:
        self._journal.begin(each.name for each in wanted)
        placed = [(place, i) for i, each in enumerate(wanted) if (place := self._places.get(each.name)) is not None]
        found: list[Data | None] = [None] * len(wanted)
        started = time.perf_counter()
        for run in runs(sorted(placed)):
            first, last = run[0][0], run[-1][0]
            try:
                with open(self._path(first.segment), "rb", buffering=0) as file:
                    data = memoryview(os.pread(file.fileno(), last.start + last.length - first.start, first.start))
            except OSError as error:
                logger.warning("prefixes in %s cannot be read: %s", self.directory, error)
                data = memoryview(b"")
            for place, i in run:
                piece, header = data[place.start - first.start :][: place.length], wanted[i].header
                own, content = piece[: len(header)], piece[len(header) :]
                if wanted[i].checksum(own, content) != place.checksum:
                    self._forget(wanted[i].name)
                elif own == header:
                    found[i] = content
            self._use(first.segment)
            self._bytes_read += data.nbytes
        self._read_seconds += time.perf_counter() - started
        return found

    def _forget(self, name: Name) -> None:
        """A block is damaged."""
        self._damaged += 1
        self._segments[self._places.pop(name).segment].names.discard(name)
        try:
            self._index.delete(name)
        except FAILURES as error:
            self._stop(error)

    def _read_index(self) -> None:
        """Read the index, as far as it fits the files. Delete the files that it does not know."""
        files = {int(path.stem): path for path in self.directory.glob(f"*{SEGMENT}") if path.stem.isdecimal()}
        for number, model in self._index.segments:
            if number in files:
                self._segments[number] = Segment(model, self._uses, files.pop(number).stat().st_size)
                self._uses += 1
            else:
                self._index.delete_segment(number)
        for path in files.values():
            path.unlink(missing_ok=True)
        sizes = {number: segment.size for number, segment in self._segments.items()}
        for name, place in self._index.blocks:
            if is_sound(name, place, sizes):
                self._places[name] = place
                self._segments[place.segment].names.add(name)
        self._day, self._written = (self._index.facts.get(name, 0) for name in ("day", "written"))
        self._next = 1 + max(self._segments, default=0)


def runs(placed: Iterable[tuple[Place, int]]) -> Iterator[list[tuple[Place, int]]]:
    """Neighbouring places of one segment, together up to READ_BYTES."""
    run: list[tuple[Place, int]] = []
    for place, i in placed:
        if run:
            first, last = run[0][0], run[-1][0]
            is_next = (place.segment, place.start) == (last.segment, last.start + last.length)
            if not is_next or place.start + place.length - first.start > READ_BYTES:
                yield run
                run = []
        run.append((place, i))
    if run:
        yield run


def take_lock(directory: Path) -> IO[bytes]:
    """Raises StoreError if another process uses the directory, or it cannot be made."""
    try:
        directory.mkdir(mode=OWNER_ONLY_DIRECTORY, parents=True, exist_ok=True)
        return lock(directory)
    except DirectoryInUseError as error:
        raise StoreError(str(error)) from None
    except OSError as error:
        raise StoreError(f"{directory} cannot be used: {error.strerror or error}") from error
