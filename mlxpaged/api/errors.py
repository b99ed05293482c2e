"""Defines the errors that clients see, turns other errors into them, and notes each refused request in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpaged.api.access.redaction import redacted
from mlxpaged.api.error_format import format_of
from mlxpaged.api.refusals import Refusal
from mlxpaged.api.request_id import HEADER
from mlxpaged.api.turns import TurnRefusedError
from mlxpaged.core.engine import errors as engine_errors
from mlxpaged.library_errors import public_reason
from mlxpaged.models.panics import TokenizerPanicError
from mlxpaged.models.text.tokenizer import ChatTemplateError, InfillError, TextTooLongError
from mlxpaged.process_memory import is_out_of_memory
from mlxpaged.registry.errors import NoRoomError
from mlxpaged.vision.decoding.decoder import DecoderError, PillowMissingError

logger = logging.getLogger(__name__)

RETRY = {"Retry-After": "1"}  # seconds
CLIENT_CLOSED_REQUEST = 499
"""nginx uses this status for a request whose client has left."""
NO_RETRY = {"x-should-retry": "false"}
"""Without this header, OpenAI's clients repeat a request after a 408, which would take as long once more."""

NO_ROOM = "insufficient_memory"
"""The code of the error of a model that does not fit."""

OUT_OF_MEMORY = "out_of_memory"
"""The code of the error of a request that an allocation failed for. A later attempt may succeed."""

NOT_STORED = "not_stored"
"""The code of the error if the disk refuses what is written to the data directory."""

NOT_RENDERED = "the chat template cannot render the messages"
"""The log's reason for a ChatTemplateError: the template's own message can have text of the conversation."""

MAX_MESSAGE, MAX_PARAM, MAX_REASON, MAX_PATH, MAX_METHOD = 500, 100, 200, 200, 20

QUOTED = re.compile(r"""(?<!\w)('(?:\\.|[^'\\])*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\Z))""", re.DOTALL)
"""What `repr` has quoted, also if the end is cut off. The apostrophe of "the model's" follows a letter."""
FIELD = re.compile(r"[A-Za-z0-9_-]{1,40}")
"""A part of a field's path that the log shows. Keys of the client's objects can be any text."""

WORDS = {
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
    "is_instance_of": "must be a file, with the name of the file",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "none_required": "must be null",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have {max_length} or fewer characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have {max_length} or fewer items",
}
"""These replace messages of pydantic, by type. pydantic names Python's types."""


class ApiError(Exception):
    """An error that is shown to the client as it is.

    A message quotes what the client sent with `repr`: the log leaves out what is quoted. reason: what the log says
    instead, if that does not suffice, because the message has text of another program or because the log needs the
    quoted value.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shortened(redacted(message), MAX_MESSAGE)
        self.kind = kind
        self.param = None if param is None else shortened(param, MAX_PARAM)
        self.code = code
        self.headers = headers
        if reason is None:
            reason = without_values(message.removeprefix(f"{param}: "))
        self.reason = shortened(reason, MAX_MESSAGE)

    @property
    def refusal_code(self) -> str:
        """Returns the code, or else the name of the status: one of few values, for the log and the metrics."""
        return self.code or HTTPStatus(self.status).phrase.lower().replace(" ", "_")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def render(error: ApiError, path: str, request_id: str) -> JSONResponse:
    form = format_of(path)
    body = error.body() if form is None else form.body(error, request_id)
    return JSONResponse(body, status_code=error.status, headers=error.headers)


def shortened(text: str, limit: int) -> str:
    """Errors quote what the client sent, which can be megabytes."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def without_values(text: str) -> str:
    """Returns an error message without what it quotes of the request."""
    return shortened(QUOTED.sub("...", text[:MAX_MESSAGE]), MAX_REASON)


def without_keys(param: str) -> str:
    """Returns the path of a field without the parts that are no names of fields."""
    return ".".join(part if FIELD.fullmatch(part) else "..." for part in param.split("."))


def bad_parameter(param: str, message: str, code: str | None = None, reason: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code, reason=reason)


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    known = f"this server has {', '.join(repr(name) for name in served)}" if served else "this server has no model"
    if served and model.startswith("claude-"):
        known += f". `ANTHROPIC_MODEL={served[0]}`, and ANTHROPIC_DEFAULT_HAIKU_MODEL and so on, tell Claude Code of it"
    return ApiError(404, f"model: {model!r} does not exist; {known}", param="model", code="model_not_found")


def load_failed(model: str, error: Exception) -> ApiError:
    message = f"model: {model!r} cannot be loaded: {error}"
    return ApiError(500, message, "server_error", "model", "load_failed", NO_RETRY)


def no_room(model: str, error: NoRoomError) -> ApiError:
    """507 is "Insufficient Storage" (RFC 4918, 11.5). The message has the numbers."""
    message = f"model: {model!r} does not fit: {error}"
    return ApiError(507, message, "server_error", "model", NO_ROOM, RETRY if error.for_now else NO_RETRY)


def not_stored(error: OSError) -> ApiError:
    """The disk is full, for example. The error's own text names paths of the server."""
    message = f"the server cannot write to its data directory: {error.strerror or type(error).__name__}"
    return ApiError(507, message, "server_error", code=NOT_STORED, headers=NO_RETRY)


BRANCHES = ("str", "constrained-str", "bool", "Document", "Thinking")
"""Branches of unions, by the names that pydantic gives them in a path. Those of lists end with a bracket."""


KINDS = {kind for kind in WORDS if kind.endswith("_type")}
"""Errors of values of another kind. pydantic has one for each branch of a union."""


def from_validation(error: ValidationError) -> ApiError:
    """Returns the most specific of pydantic's errors, with the field's path as `param`. A value that is of the kind of
    one branch of a union is judged by this branch."""
    errors = error.errors(include_url=False, include_input=False)
    worst = max(errors, key=lambda e: (len(e["loc"]), e["type"] not in KINDS))
    path = [str(part) for part in worst["loc"] if not _is_union_branch(part)]
    param = ".".join(path) or None
    if worst["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: this parameter is not supported", param=param, code="unsupported_parameter")
    if worst["type"] in KINDS:
        same = [e for e in errors if [str(part) for part in e["loc"] if not _is_union_branch(part)] == path]
        message = reason = " or ".join(dict.fromkeys(WORDS[e["type"]] for e in same)).replace(" or must be", " or")
    elif worst["type"] in WORDS:
        message = reason = WORDS[worst["type"]].format(**worst.get("ctx", {}))  # quotes nothing of the request
    else:
        message, reason = worst["msg"].removeprefix("Value error, "), None
    return ApiError(400, f"{param or 'the body'}: {message}", param=param, reason=reason)


def _is_union_branch(part: int | str) -> bool:
    """pydantic names the branch of a union in the path."""
    return isinstance(part, str) and (part in BRANCHES or part.endswith("]"))


ENGINE_ERRORS: dict[type[Exception], tuple[int, str, str, dict[str, str] | None]] = {
    engine_errors.QueueFullError: (503, "server_error", "queue_full", RETRY),
    TurnRefusedError: (503, "server_error", "engine_busy", RETRY),
    DecoderError: (503, "server_error", "engine_busy", RETRY),
    engine_errors.EngineBusyError: (503, "server_error", "engine_busy", RETRY),
    engine_errors.DeadlineExceededError: (408, "timeout_error", "deadline_exceeded", NO_RETRY),
    engine_errors.RequestCancelledError: (CLIENT_CLOSED_REQUEST, "request_cancelled", "request_cancelled", None),
    engine_errors.ConstraintFailedError: (400, "invalid_request_error", "constraint_failed", NO_RETRY),
    TextTooLongError: (400, "invalid_request_error", "text_too_long", NO_RETRY),
    InfillError: (400, "invalid_request_error", "cannot_infill", NO_RETRY),
    PillowMissingError: (501, "server_error", "pillow_missing", NO_RETRY),
    TokenizerPanicError: (500, "server_error", "tokenizer_failed", NO_RETRY),
    engine_errors.OutOfMemoryError: (503, "server_error", OUT_OF_MEMORY, RETRY),
    engine_errors.RequestFailedError: (500, "server_error", "generation_failed", None),
}
"""Status, type, code and headers of the answer."""

HANDLED = (
    ApiError,
    ChatTemplateError,
    engine_errors.DuplicateRequestError,
    engine_errors.EngineUnavailableError,
    *ENGINE_ERRORS,
)


def from_engine(error: Exception) -> ApiError:
    """Turns an error of the engine, the tokenizer or the scheduler into an answer."""
    match error:
        case ApiError():
            return error
        case ChatTemplateError():
            return ApiError(400, f"messages: {error}", param="messages", reason=NOT_RENDERED)
        case engine_errors.DuplicateRequestError():
            return ApiError(409, str(error), param=HEADER, code="request_id_in_use")
        case engine_errors.EngineUnavailableError(state=engine_errors.EngineState.DEAD):
            return ApiError(503, str(error), "server_error", code="engine_dead")
        case engine_errors.EngineUnavailableError():
            return ApiError(503, str(error), "server_error", code=error.state.value, headers=RETRY)
    if type(error) in ENGINE_ERRORS:
        status, kind, code, headers = ENGINE_ERRORS[type(error)]
        return ApiError(status, str(error), kind, code=code, headers=headers)
    if is_out_of_memory(error):
        return ApiError(
            503,
            f"the server is out of memory: {public_reason(error)}",
            "server_error",
            code=OUT_OF_MEMORY,
            headers=RETRY,
        )
    logger.exception("unexpected error while answering a request", exc_info=error)
    return ApiError(500, "internal server error", "server_error", code="internal_error")


ENDED = {"deadline_exceeded", "constraint_failed", "generation_failed"}
"""These errors end requests that were accepted. The log and the metrics have them among the finished ones."""


def answer_of(error: ApiError, scope: Scope) -> JSONResponse:
    """Returns the response to a request that is refused, and notes it."""
    note_refusal(error, scope)
    answer = render(error, scope["path"], scope["state"]["request_id"])
    if "expect" in Headers(scope=scope):  # the client may or may not send its body: the connection has to end
        answer.headers["Connection"] = "close"
    return answer


def note_refusal(error: ApiError, scope: Scope) -> None:
    """Note a refused request in the log, the metrics and `server.refusals`. The note has no text of the client's
    beyond the path and the names of fields."""
    if error.status != CLIENT_CLOSED_REQUEST and error.code not in ENDED:
        server = scope["app"].state.server
        refusal = Refusal(
            time=time.time(),
            request_id=scope["state"]["request_id"],
            method=shortened(scope["method"], MAX_METHOD),
            path=shortened(redacted(quote(scope["path"])), MAX_PATH),
            status=error.status,
            param=None if error.param is None else without_keys(error.param),
            code=error.refusal_code,
            reason=error.reason,
        )
        server.metrics.count_refusal(refusal.code)
        server.refusals.append(refusal)
        logger.info(
            "refused: method=%s path=%s status=%d param=%s code=%s reason=%s",
            refusal.method,
            refusal.path,
            refusal.status,
            refusal.param,
            refusal.code,
            refusal.reason,
        )


async def handle_api_error(request: Request, error: Exception) -> Response:
    return answer_of(from_engine(error), request.scope)


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
        except asyncio.CancelledError:  # the server ends, and the time for its answers is over
            if scope["type"] != "http":
                raise
            if not started:
                shuts_down = ApiError(503, "the server is shutting down", "server_error", code="draining")
                await answer_of(shuts_down, scope)(scope, receive, send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # too late for an answer: the connection is closed
            await answer_of(from_engine(error), scope)(scope, receive, send)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "there is nothing at", 405: f"{request.method} is not allowed at"}
    text = texts.get(error.status_code)
    message, reason = (error.detail, None) if text is None else (f"{text} {request.url.path}", f"{text} this path")
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 405:  # Starlette names the methods of the first route of this path only
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        headers = {"Allow": ", ".join(sorted({method for route in routes for method in route.methods}))}
    answer = ApiError(error.status_code, message, headers=headers, reason=reason)
    return await handle_api_error(request, answer)
