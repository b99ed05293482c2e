"""Keeps files and batches in a directory. Every method may block on the disk.

    files/ID            a file's content           files/ID.json    its record
    batches/ID.json     a batch's record           batches/ID.output, ID.errors   finished lines, in order of completion

Records are replaced whole, by renaming. Lines are appended; the next start cuts off an incomplete line and runs that
request again. It also runs a request again if its line was lost in a power failure.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel

from mlxpaged.api.atomic_file import replacing
from mlxpaged.api.batches.records import BatchRecord, FileRecord, OutputLine

Record = TypeVar("Record", bound=BaseModel)


class DataDirInUseError(Exception):
    """Another server keeps its files in this directory."""


class Store:
    """Holds a lock on its directory. `files` and `batches` have the records by id, the oldest first."""

    def __init__(self, directory: Path) -> None:
        """Raises DataDirInUseError, or OSError if the directory cannot be used."""
        self._files, self._batches = directory / "files", directory / "batches"
        for path in (self._files, self._batches):
            path.mkdir(parents=True, exist_ok=True)
        self._lock = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise DataDirInUseError(f"another server uses {directory}") from None
        self._readers = Counter[str]()  # of each file's content
        self.files = load(self._files, FileRecord)
        self.batches = load(self._batches, BatchRecord)

    def close(self) -> None:
        self._lock.close()

    def content(self, file_id: str) -> Path:
        return self._files / file_id

    def add_file(self, record: FileRecord, content: IO[bytes]) -> None:
        with replacing(self.content(record.id)) as file:
            shutil.copyfileobj(content, file)
        self._publish(record)

    def _publish(self, record: FileRecord) -> None:
        save(self._files / f"{record.id}.json", record)
        self.files[record.id] = record

    def delete_file(self, file_id: str) -> None:
        """Called on the event loop. The record is deleted first: content without a record is not shown."""
        del self.files[file_id]
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        if not self._readers[file_id]:
            self.content(file_id).unlink(missing_ok=True)

    @contextlib.contextmanager
    def reading(self, file_id: str) -> Iterator[None]:
        """Called on the event loop. Until the end of the context, the content stays although the file is deleted."""
        self._readers[file_id] += 1
        try:
            yield
        finally:
            self._readers[file_id] -= 1
            if not self._readers[file_id]:
                del self._readers[file_id]
                if file_id not in self.files:
                    self.content(file_id).unlink(missing_ok=True)

    def save_batch(self, batch: BatchRecord) -> None:
        save(self._batches / f"{batch.id}.json", batch)
        self.batches[batch.id] = batch

    def results(self, batch_id: str, kind: str) -> Path:
        """kind: "output" or "errors"."""
        return self._batches / f"{batch_id}.{kind}"

    def append(self, batch_id: str, line: OutputLine) -> None:
        with self.results(batch_id, "output" if line.succeeded else "errors").open("ab") as file:
            file.write(line.model_dump_json().encode() + b"\n")

    def done(self, batch_id: str, kind: str) -> set[str]:
        """Returns the custom ids of the finished lines. Cuts off an incomplete last line."""
        path = self.results(batch_id, kind)
        done: set[str] = set()
        if not path.exists():
            return done
        with path.open("r+b") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break
                done.add(OutputLine.model_validate_json(line).custom_id)
                end += len(line)
            file.truncate(end)
        return done

    def publish_results(self, batch: BatchRecord, kind: str, created_at: int) -> str | None:
        """Make a file of the finished lines; repeating this is harmless. Returns its id, None if there are no lines."""
        path, file_id = self.results(batch.id, kind), f"file-{batch.id}-{kind}"
        if path.exists():
            os.replace(path, self.content(file_id))
        elif not self.content(file_id).exists():
            return None
        size, name = self.content(file_id).stat().st_size, f"{batch.id}_{kind}.jsonl"
        record = FileRecord(id=file_id, bytes=size, created_at=created_at, filename=name, purpose="batch_output")
        self._publish(record.model_copy(update={"owner": batch.owner}))
        return file_id


def load(directory: Path, kind: type[Record]) -> dict[str, Record]:
    """Returns all records of a directory by id. Raises ValueError for a broken one, which would otherwise be lost."""
    records = [kind.model_validate_json(path.read_bytes()) for path in directory.glob("*.json")]
    records.sort(key=lambda record: (record.created_at, record.id))  # type: ignore[attr-defined]
    return {record.id: record for record in records}  # type: ignore[attr-defined]


def save(path: Path, record: BaseModel) -> None:
    with replacing(path) as file:
        file.write(record.model_dump_json().encode())
