"""Lists the paths whose errors and ids have a format of their own. All other paths have OpenAI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class ErrorFormat:
    """prefix: begins its paths, without /v1. id_header: also has the request's id. body: makes a body of (ApiError,
    request id), which fits `model`."""

    prefix: str
    id_header: str
    body: Callable[[Any, str], dict[str, Any]]
    model: type[BaseModel]


FORMATS: list[ErrorFormat] = []
"""Each API adds its own when it is imported."""


def format_of(path: str) -> ErrorFormat | None:
    short = without_version(path)
    return next((each for each in FORMATS if short == each.prefix or short.startswith(f"{each.prefix}/")), None)


def without_version(path: str) -> str:
    """Returns the path without /v1 at its beginning."""
    return path.removeprefix("/v1") if path.startswith("/v1/") else path
