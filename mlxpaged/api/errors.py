"""Defines the errors that clients see, and turns other errors into them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpaged import engine
from mlxpaged.api.access.redaction import redacted
from mlxpaged.api.error_format import format_of
from mlxpaged.api.request_id import HEADER
from mlxpaged.models.tokenizer import ChatTemplateError

logger = logging.getLogger(__name__)

RETRY = {"Retry-After": "1"}  # seconds
CLIENT_CLOSED_REQUEST = 499
"""nginx uses this status for a request whose client has left."""
NO_RETRY = {"x-should-retry": "false"}
"""Without this header, OpenAI's clients repeat a request after a 408, which would take as long once more."""

MAX_MESSAGE, MAX_PARAM = 500, 100

JSON_WORDS = {"model_type": "must be an object", "dict_type": "must be an object", "list_type": "must be an array"}
"""These replace messages of pydantic that name Python's types."""


class ApiError(Exception):
    """An error that is shown to the client as it is."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened(redacted(message), MAX_MESSAGE)
        self.kind = kind
        self.param = None if param is None else shortened(param, MAX_PARAM)
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def render(error: ApiError, path: str, request_id: str) -> JSONResponse:
    form = format_of(path)
    body = error.body() if form is None else form.body(error, request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def shortened(text: str, limit: int) -> str:
    """Errors quote what the client sent, which can be megabytes."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def bad_parameter(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    known = f"this server has {', '.join(repr(name) for name in served)}" if served else "this server has no model"
    return ApiError(404, f"model: {model!r} does not exist; {known}", param="model", code="model_not_found")


def from_validation(error: ValidationError) -> ApiError:
    """Returns the most specific of pydantic's errors, with the field's path as `param`."""
    worst = max(error.errors(include_url=False, include_input=False), key=lambda e: len(e["loc"]))
    path = [str(part) for part in worst["loc"] if not _is_union_branch(part)]
    param = ".".join(path) or None
    if worst["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: this parameter is not supported", param=param, code="unsupported_parameter")
    message = JSON_WORDS.get(worst["type"], worst["msg"].removeprefix("Value error, "))
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)


def _is_union_branch(part: int | str) -> bool:
    """pydantic names the branch of a union in the path: str, constrained-str, list[int]."""
    return isinstance(part, str) and (part in ("str", "constrained-str") or part.endswith("]"))


ENGINE_ERRORS: dict[type[Exception], tuple[int, str, str, dict[str, str] | None]] = {
    engine.QueueFullError: (503, "server_error", "queue_full", RETRY),
    engine.EngineBusyError: (503, "server_error", "engine_busy", RETRY),
    engine.DeadlineExceededError: (408, "timeout_error", "deadline_exceeded", NO_RETRY),
    engine.RequestCancelledError: (CLIENT_CLOSED_REQUEST, "request_cancelled", "request_cancelled", None),
    engine.RequestFailedError: (500, "server_error", "generation_failed", None),
}
"""Status, type, code and headers of the answer."""

HANDLED = (ApiError, ChatTemplateError, engine.DuplicateRequestError, engine.EngineUnavailableError, *ENGINE_ERRORS)


def from_engine(error: Exception) -> ApiError:
    """Turns an error of the engine, the tokenizer or the scheduler into an answer."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            return ApiError(400, f"messages: {error}", param="messages")
        case engine.DuplicateRequestError():
            return ApiError(409, str(error), param=HEADER, code="request_id_in_use")
        case engine.EngineUnavailableError(state=engine.EngineState.DEAD):
            return ApiError(503, str(error), "server_error", code="engine_dead")
        case engine.EngineUnavailableError():
            return ApiError(503, str(error), "server_error", code=error.state.value, headers=RETRY)
    if type(error) in ENGINE_ERRORS:
        status, kind, code, headers = ENGINE_ERRORS[type(error)]
        return ApiError(status, str(error), kind, code=code, headers=headers)
    logger.exception("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "internal server error", "server_error", code="internal_error")


async def handle_api_error(request: Request, error: Exception) -> Response:
    return render(from_engine(error), request.url.path, request.state.request_id)


class Errors:
    """Middleware that answers the errors of the middleware inside it, and all unexpected errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # too late for an answer: the connection is closed
            answer = render(from_engine(error), scope["path"], scope["state"]["request_id"])
            if "expect" in Headers(scope=scope):  # the client may or may not send its body: the connection has to end
                answer.headers["Connection"] = "close"
            await answer(scope, receive, send)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.method} is not allowed at {request.url.path}",
    }
    headers = dict(error.headers) if error.headers else None
    answer = ApiError(error.status_code, messages.get(error.status_code, error.detail), headers=headers)
    return await handle_api_error(request, answer)
