"""The input file of a batch: one request per line, checked as a whole before any of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlxpaged.api.batches.records import LineError

MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_ERRORS = 100
"""A file with more errors is reported with the first ones."""


class InputLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]  # of a request to `url`; checked when it runs, so that an error fails this line only


class LinePlace(NamedTuple):
    """Where a request lies in its file."""

    custom_id: str
    offset: int  # bytes
    size: int  # bytes


class BadLineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def check_lines(path: Path, endpoint: str) -> tuple[list[LinePlace], list[LineError]]:
    """The requests of a file, and its errors."""
    places: dict[str, LinePlace] = {}
    errors: list[LineError] = []
    with path.open("rb") as file:
        offset = 0
        for number, text in enumerate(file, start=1):
            start, offset = offset, offset + len(text)
            if not text.strip():
                continue
            try:
                custom_id = check_line(text, endpoint)
                if custom_id in places:
                    raise BadLineError("duplicate_custom_id", "custom_id: an earlier line has the same", "custom_id")
                if len(places) == MAX_REQUESTS:
                    raise BadLineError("too_many_requests", f"the file has more than {MAX_REQUESTS} requests")
                places[custom_id] = LinePlace(custom_id, start, len(text))
            except BadLineError as error:
                errors.append(LineError(code=error.code, message=str(error), param=error.param, line=number))
                if len(errors) == MAX_ERRORS or len(places) == MAX_REQUESTS:
                    break
    if not places and not errors:
        errors.append(LineError(code="empty_file", message="the file has no requests", line=1))
    return list(places.values()), errors


def check_line(text: bytes, endpoint: str) -> str:
    """The line's custom id. Raises BadLineError."""
    if len(text) > MAX_LINE_BYTES:
        raise BadLineError("line_too_long", f"a request may have {MAX_LINE_BYTES // 1024**2} MiB")
    try:
        line = InputLine.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise BadLineError("invalid_json_line", "the line is not valid JSON") from None
        param = ".".join(map(str, first["loc"])) or None
        raise BadLineError("invalid_request", f"{param}: {first['msg']}" if param else first["msg"], param) from None
    if line.url != endpoint:
        raise BadLineError("mismatched_url", f"url: the batch is for {endpoint}", "url")
    return line.custom_id


def read_line(path: Path, place: LinePlace) -> InputLine:
    with path.open("rb") as file:
        file.seek(place.offset)
        return InputLine.model_validate_json(file.read(place.size))
