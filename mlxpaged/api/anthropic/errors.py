"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from mlxpaged.api.error_format import ErrorFormat
from mlxpaged.api.errors import ApiError
from mlxpaged.api.fields.messages import THREAD_REFUSED


class AnthropicErrorDetail(BaseModel):
    """details: an `error_code` that says more than the type, if there is one."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Types of errors by status. Other statuses below 499 are the client's mistakes, all others are the server's."""


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
    if error.status == 503 and "Retry-After" in (error.headers or {}):
        kind = "overloaded_error"
    found: dict[str, Any] = {"type": kind, "message": error.message}
    if error.code == THREAD_REFUSED:
        found["details"] = {"error_code": THREAD_REFUSED, "unsupported": ["thread"]}
    return {"type": "error", "error": found, "request_id": request_id}


ERRORS = ErrorFormat("/messages", id_header="Request-Id", body=error_body, model=AnthropicErrorResponse)
