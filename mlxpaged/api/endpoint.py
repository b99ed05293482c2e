"""Defines what an endpoint is, and an API. `endpoints.py` has all endpoints of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.error_format import ErrorFormat, without_version
from mlxpaged.api.errors import ApiError
from mlxpaged.api.streaming import EVENTS, LINES, Beginning, Model, Respond, handler

JSON, FORM, BYTES = "application/json", "multipart/form-data", "application/octet-stream"
TEXT, HTML = "text/plain", "text/html"

Handler = Callable[[Request], Awaitable[Response]]


class Access(Enum):
    OPEN = auto()  # needs no key, and does not count against --max-connections
    KEY = auto()  # needs a key, if the server has keys
    METRICS = auto()  # needs an admin key or one for metrics, if the server has keys
    ADMIN = auto()  # needs an admin key, if the server has keys


class JsonObject(BaseModel):
    """An answer that has the fields of the API that it follows."""

    model_config = {"extra": "allow"}


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str  # with Starlette's converters
    handler: Handler
    summary: str
    body: type[BaseModel] | None = None  # model of the request's body
    answer: type[BaseModel] = JsonObject  # model of a 200's body
    access: Access = Access.KEY
    query: type[BaseModel] | None = None  # model of the URL's parameters
    body_type: str = JSON
    answer_type: str = JSON
    streams: str | None = None  # generates text: media type of a streamed answer; the answer can have a timeline
    cancellable: bool = False  # DELETE /v1/requests/{id} can end it, so that its X-Request-Id has to be a valid id

    def routes(self) -> list[Route]:
        """Some clients leave out /v1. So each path that begins with it is there without it too."""
        restricted = self.access in (Access.ADMIN, Access.METRICS)
        handler = restrict(self.handler, self.access) if restricted else self.handler
        paths = dict.fromkeys((self.path, without_version(self.path)))
        return [Route(path, handler, methods=[self.method]) for path in paths]


get, post, delete = (partial(Endpoint, method) for method in ("GET", "POST", "DELETE"))


def reads(
    path: str,
    respond: Respond[Model],
    summary: str,
    body: type[Model],
    streams: str | None = None,
    begin: type[Beginning] | None = None,
    **options: Any,
) -> Endpoint:
    """Returns an endpoint that reads a body. Its work ends when the client leaves. begin: as in `handler`."""
    return post(path, handler(body, respond, streams, begin), summary, body, streams=streams, **options)


generates = partial(reads, streams=EVENTS, cancellable=True)
answers = partial(reads, streams=LINES, cancellable=True)


def start_nothing(app: Starlette) -> AbstractAsyncContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Api:
    """Endpoints that belong together.

    errors: how an error looks at their paths; None for OpenAI's format. start: called when the application is made; it
    may set fields of `app.state`. The context is that of the time in which the application runs. What it raises ends
    the start of the server.
    """

    endpoints: tuple[Endpoint, ...]
    errors: ErrorFormat | None = None
    start: Callable[[Starlette], AbstractAsyncContextManager[None]] = start_nothing


def by_header(name: str, theirs: Handler, ours: Handler) -> Handler:
    """Returns a handler that leaves requests with a header to `theirs`."""

    async def chosen(request: Request) -> Response:
        return await (theirs if name in request.headers else ours)(request)

    return chosen


def restrict(handler: Handler, access: Access) -> Handler:
    """Lets only admin keys call the handler, and those for metrics if that is the access."""

    async def checked(request: Request) -> Response:
        caller = caller_of(request)
        allowed = caller is None or caller.admin or (access is Access.METRICS and caller.metrics)
        if caller is not None and not allowed:
            message = f"{request.method} {request.url.path} needs an admin key; {caller.name!r} is not one"
            raise ApiError(403, message, "permission_error", code="admin_key_required")
        return await handler(request)

    return checked
