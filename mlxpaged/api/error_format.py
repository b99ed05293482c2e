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

    def has(self, path: str) -> bool:
        """Whether the errors at a path have this format."""
        return f"{without_version(path)}/".startswith(f"{self.prefix}/")


FORMATS: list[ErrorFormat] = []
"""Those of all APIs, which endpoints.py adds."""


def format_of(path: str) -> ErrorFormat | None:
    return next((each for each in FORMATS if each.has(path)), None)


def without_version(path: str) -> str:
    """Returns the path without /v1 at its beginning."""
    return path.removeprefix("/v1") if path.startswith("/v1/") else path
