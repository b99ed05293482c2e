"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # errors.py asks here what to answer
    from mlxpaged.api.errors import ApiError

PREFIX = "/v1/messages"
"""Of the paths whose errors have this format."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""By status. The others are the client's mistakes below 499, and the server's from there on."""


def speaks_anthropic(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    if error.status == 503 and "Retry-After" in (error.headers or {}):
        kind = "overloaded_error"
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
