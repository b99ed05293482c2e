"""Keeps files and batches in a directory. Every method may block on the disk, and what it has written survives a power
failure once it returns.

    files/ID                        a file's content
    files/ID.json, ID.copy          its record, twice
    files/file-BATCH-output         lines of a batch that succeeded, in order of completion; -errors: those that did not
    batches/ID.json, ID.copy        a batch's record, twice
    batches/ID.running              what runs of it now, for the case that the process dies of it (journal.py)

Records and contents are replaced whole, by renaming. Lines are appended, so a sudden end of the machine can leave a
part of the last ones. The next start drops lines that are not whole, and they are run again. If one of the two records
is damaged, the other one is used.

A file is there if its content is: the content gets its name after the record, and is deleted before it.

The records are not in SQLite. Zeros in one of the 24 sectors of a small database kept the server from starting (3
sectors) or lost a record (2), and the code was no shorter: contents are sent by ranges, so they stay files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mlxpaged.api.batches.records import READ_BYTES, AnyRecord, BatchRecord, FileRecord, OutputLine, Record
from mlxpaged.api.streaming import one_line, without_ends
from mlxpaged.durable_files import OWNER_ONLY, append, flush_directory, lock, make_private, replacing
from mlxpaged.journal import Journal

logger = logging.getLogger(__name__)

OUTPUT, ERRORS = "output", "errors"
"""The kinds of results of a batch."""

DELETED = ".{}.deleted"
"""The name of a file that says that the content of another one, by its id, was deleted while it was read."""


class Store:
    """Holds a lock on its directory. `files` and `batches` have the records by id, the oldest first."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryInUseError, or OSError if the directory cannot be used."""
        if not directory.exists():
            make_private(directory)  # one that is there may be shared, and keeps its permissions
        self._files, self._batches = directory / "files", directory / "batches"
        for path in (self._files, self._batches):
            make_private(path)
            check_writable(path)
        self._lock = lock(directory)
        try:
            self._readers = Counter[str]()  # of each file's content
            for mark in self._files.glob(DELETED.format("*")):
                self.content(mark.name[1:].removesuffix(mark.suffix)).unlink(missing_ok=True)
            # Of a server that ended while it wrote. Files that begin otherwise are the user's, or the Finder's.
            for unfinished in (*self._files.glob(".file-*"), *self._batches.glob(".batch-*")):
                unfinished.unlink()
            self.files = load(self._files, FileRecord)
            self.batches = load(self._batches, BatchRecord)
            for batch in self.batches.values():
                if not batch.unfinished:  # the server has ended before it was deleted
                    self._journal_of(batch.id).unlink(missing_ok=True)
            for file in list(self.files.values()):
                self._check(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._lock.close()

    def _check(self, file: FileRecord) -> None:
        """Remove the record if it has no content, and note it if a part of the content is lost."""
        path = self.content(file.id)
        if not path.exists():
            logger.warning("the file %s has no content: its upload or its deletion was cut short", file.id)
            self.delete_file(file.id)
        elif path.stat().st_size != file.bytes:
            file.status = "error"
            file.status_details = f"the file is damaged: it has {path.stat().st_size} bytes"
            logger.error("the file %s is damaged: it has %d of %d bytes", file.id, path.stat().st_size, file.bytes)

    def content(self, file_id: str) -> Path:
        return self._files / file_id

    def add_file(self, record: FileRecord, content: IO[bytes]) -> None:
        """After an error, nothing is left of the file."""
        try:
            with replacing(self.content(record.id)) as file:
                shutil.copyfileobj(content, file)
                save(self._files, record)
        except BaseException:
            self.delete_file(record.id)
            raise
        self.files[record.id] = record

    def delete_file(self, file_id: str) -> None:
        """The content stays until the last one who reads it has ended, or the server."""
        if self._readers[file_id]:
            (self._files / DELETED.format(file_id)).touch(OWNER_ONLY)
        else:
            self.content(file_id).unlink(missing_ok=True)
        flush_directory(self._files)
        for path in record_paths(self._files, file_id):
            path.unlink(missing_ok=True)
        flush_directory(self._files)
        self.files.pop(file_id, None)

    def begin_reading(self, file_id: str) -> None:
        """Keep the content until `end_reading`, although the file is deleted. Called on the event loop."""
        self._readers[file_id] += 1

    def end_reading(self, file_id: str) -> None:
        self._readers[file_id] -= 1
        if not self._readers[file_id]:
            del self._readers[file_id]
            if file_id not in self.files:
                self.content(file_id).unlink(missing_ok=True)
                (self._files / DELETED.format(file_id)).unlink(missing_ok=True)

    def add_batch(self, batch: BatchRecord) -> None:
        """After an error, nothing is left of the batch."""
        try:
            self.save_batch(batch)
        except BaseException:
            for path in record_paths(self._batches, batch.id):
                path.unlink(missing_ok=True)
            raise

    def save_batch(self, batch: BatchRecord, **changes: Any) -> None:
        """Change the batch, on the disk first. Its `errors` are dropped unless they are in `changes`: those of an
        unfinished batch say what it waits for now."""
        changes = {"errors": None} | changes
        save(self._batches, batch.model_copy(update=changes))
        for name, value in changes.items():
            setattr(batch, name, value)
        self.batches[batch.id] = batch

    def journal(self, batch_id: str) -> Journal:
        """What ran of the batch when a server died. To be closed."""
        return Journal(self._journal_of(batch_id))

    def _journal_of(self, batch_id: str) -> Path:
        return self._batches / f"{batch_id}.running"

    def append(self, batch_id: str, kind: str, lines: Sequence[OutputLine]) -> None:
        """The lines are on the disk when this returns. After an error, none of them is in the file."""
        append(self.content(result_id(batch_id, kind)), "".join(f"{text_of(line)}\n" for line in lines).encode())

    def done(self, batch_id: str, kind: str) -> set[str]:
        """Returns the custom ids of the finished lines. Drops lines that are not whole."""
        path = self.content(result_id(batch_id, kind))
        if not path.exists():
            return set()
        done, size = set[str](), 0
        for line, custom_id in whole_lines(path):
            done.add(custom_id)
            size += len(line)
        if size != path.stat().st_size:
            logger.warning("%s: answers that were not whole on the disk are dropped and run again", batch_id)
            with replacing(path) as file:
                file.writelines(line for line, _ in whole_lines(path))
        return done

    def publish_results(self, batch: BatchRecord, kind: str, created_at: int) -> str | None:
        """Make a file of the finished lines; repeating this is harmless. Returns its id, None if there are no lines."""
        file_id, name = result_id(batch.id, kind), f"{batch.id}_{kind}.jsonl"
        path = self.content(file_id)
        if not path.exists() or (size := path.stat().st_size) == 0:
            return None
        record = FileRecord(id=file_id, bytes=size, created_at=created_at, filename=name, purpose="batch_output")
        record.owner = batch.owner
        save(self._files, record)
        self.files[file_id] = record
        return file_id


def result_id(batch_id: str, kind: str) -> str:
    """Returns the id of the file with the lines of a batch. kind: OUTPUT or ERRORS."""
    return f"file-{batch_id}-{kind}"


def whole_lines(path: Path) -> Iterator[tuple[bytes, str]]:
    """The finished lines in a file, with their custom ids. A line of which the machine's end left a part is not JSON:
    its end is missing, or parts that were not written are zeros."""
    with path.open("rb", READ_BYTES) as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield line.rstrip(b"\n") + b"\n", OutputLine.model_validate_json(line).custom_id


def check_writable(path: Path) -> None:
    """Raises OSError, which otherwise only the first upload would. A full disk is no error: it may have room later."""
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def record_paths(directory: Path, record_id: str) -> tuple[Path, Path]:
    return directory / f"{record_id}.json", directory / f"{record_id}.copy"


def save(directory: Path, record: Record) -> None:
    for path in record_paths(directory, record.id):
        with replacing(path) as file:
            file.write(record.model_dump_json().encode())


def text_of(line: OutputLine) -> str:
    """One line of JSON. The body of an answer stays as it came: to parse 35 MB of it would block all threads."""
    if line.response is None or not isinstance(body := line.response["body"], bytes | memoryview):
        return one_line(line)
    without_body = one_line(line.model_copy(update={"response": line.response | {"body": None}}))
    before, name, after = without_body.rpartition('"body":')
    return f"{before}{name}{without_ends(bytes(body).decode())}{after.removeprefix('null')}"


def load(directory: Path, kind: type[AnyRecord]) -> dict[str, AnyRecord]:
    """Returns all records of a directory by id. The files of one whose copies are both damaged stay where they are."""
    ids = {path.stem for path in directory.iterdir() if path.suffix in (".json", ".copy")}
    records = [record for each in ids if (record := load_record(directory, each, kind)) is not None]
    return {each.id: each for each in sorted(records, key=lambda each: (each.created_at, each.id))}


def load_record(directory: Path, record_id: str, kind: type[AnyRecord]) -> AnyRecord | None:
    """Returns the newer of the two copies that can be read, and mends the other one."""
    records: list[AnyRecord] = []
    for path in record_paths(directory, record_id):
        with contextlib.suppress(OSError, ValueError):
            records.append(kind.model_validate_json(path.read_bytes()))
    records = [record for record in records if record.id == record_id]
    if not records:
        logger.error("the record %s is damaged and left out; its files stay in %s", record_id, directory)
        return None
    if records != [records[0]] * 2:
        logger.warning("a copy of the record %s was damaged or older; it is mended", record_id)
        with contextlib.suppress(OSError):  # a full disk
            save(directory, records[0])
    return records[0]
