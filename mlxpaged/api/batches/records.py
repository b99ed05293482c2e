"""Defines files, batches and output lines in OpenAI's format. The API shows these records, and the disk keeps them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel

READ_BYTES = 2**20
"""Buffer for files of many lines. A thread that reads leaves the interpreter lock and takes it again at once, and those
that wait for the lock wait anew, for 5 ms. If it reads more often, they wait for as long as it works."""

UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class Record(BaseModel):
    id: str
    owner: str | None = None  # name of the key that it belongs to, not shown; None on a server without keys

    def shown(self) -> dict[str, Any]:
        return self.model_dump(exclude={"owner"})


class FileRecord(Record):
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed", "error"] = "processed"
    status_details: str | None = None  # the error
    expires_at: int | None = None


class RequestCounts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class LineError(BaseModel):
    """One reason why a batch failed, or what an unfinished one waits for."""

    code: str
    message: str
    line: int | None = None  # of the input file, from 1
    param: str | None = None


class LineErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[LineError]


class BatchRecord(Record):
    """Times are seconds since 1970."""

    object: Literal["batch"] = "batch"
    endpoint: str
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED


AnyRecord = TypeVar("AnyRecord", FileRecord, BatchRecord)


class OutputLine(BaseModel):
    """One line of an output file (a 200) or of an error file (all others)."""

    id: str
    custom_id: str
    response: dict[str, Any] | None = None  # status_code, request_id and body, which bytes are JSON already
    error: dict[str, str] | None = None  # code and message, if the request was not run

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response["status_code"] == 200
