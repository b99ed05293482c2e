"""Lists the paths whose errors and ids have a format of their own. All other paths have OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ErrorFormat:
    """prefix: begins its paths. id_header: also has the request's id. body: makes a body of (ApiError, request id)."""

    prefix: str
    id_header: str
    body: Callable[[Any, str], dict[str, Any]]


FORMATS: list[ErrorFormat] = []
"""Each API adds its own when it is imported."""


def format_of(path: str) -> ErrorFormat | None:
    return next((each for each in FORMATS if path == each.prefix or path.startswith(f"{each.prefix}/")), None)
