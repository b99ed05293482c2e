"""Reads the input file of a batch. It has one request per line. The whole file is checked before any request runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from mlxpaged.api.batches.records import READ_BYTES, LineError
from mlxpaged.api.body import parse_json, validate
from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.schema import Body

MAX_REQUESTS = 50_000
MAX_LINE_BYTES = 32 * 2**20
MAX_ERRORS = 100
"""If a file has more errors, only the first ones are reported."""


class InputLine(Body):
    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]  # of a request to `url`; checked when it runs, so that an error fails this line only


class LinePlace(NamedTuple):
    """The position of a request in its file."""

    custom_id: str
    offset: int  # bytes
    size: int  # bytes


def check_lines(path: Path, endpoint: str) -> tuple[list[LinePlace], list[LineError]]:
    """Returns the requests of a file, and its errors."""
    places: dict[str, LinePlace] = {}
    errors: list[LineError] = []
    with path.open("rb", READ_BYTES) as file:
        offset = 0
        for number, text in enumerate(file, start=1):
            start, offset = offset, offset + len(text)
            if not text.strip():
                continue
            try:
                custom_id = check_line(text, endpoint)
                if custom_id in places:
                    raise bad_parameter("custom_id", "an earlier line has the same custom_id", "duplicate_custom_id")
                if len(places) == MAX_REQUESTS:
                    raise ApiError(400, f"the file has more than {MAX_REQUESTS} requests", code="too_many_requests")
                places[custom_id] = LinePlace(custom_id, start, len(text))
            except ApiError as error:
                code = error.code or "invalid_request"
                errors.append(LineError(code=code, message=error.message, param=error.param, line=number))
                if len(errors) == MAX_ERRORS or len(places) == MAX_REQUESTS:
                    break
    if not places and not errors:
        errors.append(LineError(code="empty_file", message="the file has no requests", line=1))
    return list(places.values()), errors


def check_line(text: bytes, endpoint: str) -> str:
    """Returns the line's custom id. Raises ApiError if the line is no request to `endpoint`."""
    if len(text) > MAX_LINE_BYTES:
        raise ApiError(400, f"the line is longer than {MAX_LINE_BYTES // 1024**2} MiB", code="line_too_long")
    try:
        line = validate(parse_json(text), InputLine)
    except ValueError:
        raise ApiError(400, "the line is not valid JSON", code="invalid_json_line") from None
    except ApiError as error:  # a batch has one code for all of them
        raise ApiError(400, error.message, param=error.param) from None
    if line.url != endpoint:
        raise bad_parameter("url", f"must be {endpoint}, the endpoint of the batch", "mismatched_url")
    return line.custom_id


def read_line(path: Path, place: LinePlace) -> InputLine:
    with path.open("rb") as file:
        file.seek(place.offset)
        return InputLine.model_validate(parse_json(file.read(place.size)))
