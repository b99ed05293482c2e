"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import Any

PREFIX = "/v1/messages"
"""Of the paths whose errors have this format."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status. The others are the client's mistakes below 499, and the server's from there on."""


def speaks_anthropic(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 499 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
