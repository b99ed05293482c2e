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


def check_lines(path: Path, endpoint: str) -> tuple[list[LinePlace], list[LineError]]:
    """The requests of a file, or what is wrong with it."""
    places: list[LinePlace] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    with path.open("rb") as file:
        offset = 0
        for number, text in enumerate(file, start=1):
            start, offset = offset, offset + len(text)
            if not text.strip():
                continue
            error, custom_id = check_line(text, endpoint, seen)
            if error is None and len(places) == MAX_REQUESTS:
                error = ("too_many_requests", f"the file has more than {MAX_REQUESTS} requests", None)
            if error is not None:
                errors.append(LineError(code=error[0], message=error[1], param=error[2], line=number))
                if len(errors) == MAX_ERRORS or len(places) == MAX_REQUESTS:
                    break
                continue
            seen.add(custom_id)
            places.append(LinePlace(custom_id, start, len(text)))
    if not places and not errors:
        errors.append(LineError(code="empty_file", message="the file has no requests", line=1))
    return places, errors


def check_line(text: bytes, endpoint: str, seen: set[str]) -> tuple[tuple[str, str, str | None] | None, str]:
    """((code, message, param) of the error or None, custom_id)."""
    if len(text) > MAX_LINE_BYTES:
        return ("line_too_long", f"a request may have {MAX_LINE_BYTES // 1024**2} MiB", None), ""
    try:
        line = InputLine.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            return ("invalid_json_line", "the line is not valid JSON", None), ""
        param = ".".join(map(str, first["loc"])) or None
        return ("invalid_request", f"{param}: {first['msg']}" if param else first["msg"], param), ""
    if line.url != endpoint:
        return ("mismatched_url", f"url: the batch is for {endpoint}", "url"), ""
    if line.custom_id in seen:
        return ("duplicate_custom_id", "custom_id: an earlier line has the same", "custom_id"), ""
    return None, line.custom_id


def read_line(path: Path, place: LinePlace) -> InputLine:
    with path.open("rb") as file:
        file.seek(place.offset)
        return InputLine.model_validate_json(file.read(place.size))
