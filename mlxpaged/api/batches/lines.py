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
MAX_LINES = 2 * MAX_REQUESTS
"""With blank ones: 150 MB of line feeds take 24 seconds."""
MAX_LINE_BYTES = 32 * 2**20
MAX_ERRORS = 100
"""If a file has more errors, only the first ones are reported."""
PART_BYTES = 2**18
"""Bytes of a file that are checked in a turn: 1,700 short lines take 0.1 seconds."""
TOO_MANY = "too_many_requests"


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

    @property
    def name(self) -> str:
        """Its name in the batch's journal."""
        return str(self.offset)


class FileCheck:
    """Checks the input file of a batch, a part at a time: others use the disk in between. `places` has
    its requests and `errors` its errors, once it is done."""

    def __init__(self, path: Path, endpoint: str) -> None:
        self.is_done = False
        self.errors: list[LineError] = []
        self._path, self._endpoint = path, endpoint
        self._places: dict[str, LinePlace] = {}
        self._lines_read = self._bytes_read = 0

    @property
    def places(self) -> list[LinePlace]:
        return list(self._places.values())

    def check_part(self) -> None:
        """Check lines of about PART_BYTES. Raises OSError."""
        with self._path.open("rb", READ_BYTES) as file:
            file.seek(self._bytes_read)
            end = self._bytes_read + PART_BYTES
            while self._bytes_read < end and not self.is_done:
                start, text = self._bytes_read, file.readline(MAX_LINE_BYTES + 1)
                self._lines_read += 1
                self._bytes_read += len(text)
                try:
                    self._add(text, start)
                except ApiError as error:
                    self._note(error)
                while len(text) > MAX_LINE_BYTES and not text.endswith(b"\n"):  # the rest of a line that is too long
                    text = file.readline(MAX_LINE_BYTES + 1)
                    self._bytes_read += len(text)

    def _add(self, text: bytes, start: int) -> None:
        """Raises ApiError for what is no request."""
        if not text:
            self.is_done = True
            if not self._places and not self.errors:
                self.errors.append(LineError(code="empty_file", message="the file has no requests", line=1))
        elif self._lines_read > MAX_LINES:
            self.is_done = True
            raise ApiError(400, f"the file has more than {MAX_LINES} lines, with those that are blank", code=TOO_MANY)
        elif text.strip():
            custom_id = check_line(text, self._endpoint)
            if custom_id in self._places:
                raise bad_parameter("custom_id", "an earlier line has the same custom_id", "duplicate_custom_id")
            if len(self._places) == MAX_REQUESTS:
                raise ApiError(400, f"the file has more than {MAX_REQUESTS} requests", code=TOO_MANY)
            self._places[custom_id] = LinePlace(custom_id, start, len(text))

    def _note(self, error: ApiError) -> None:
        code = error.code or "invalid_request"
        self.errors.append(LineError(code=code, message=error.message, param=error.param, line=self._lines_read))
        self.is_done = self.is_done or len(self.errors) == MAX_ERRORS or len(self._places) == MAX_REQUESTS


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
