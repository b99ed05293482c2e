"""The id of a request, which every response names in its header X-Request-Id, and every line in the log."""

from __future__ import annotations

import logging
import re
import uuid
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpaged.api.error_format import format_of

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
VALID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
"""Not "." nor "..": clients take those out of the URL that would name the request."""

_state: ContextVar[dict[str, Any] | None] = ContextVar("request_state", default=None)
"""Of the request that this task answers; its id may still change."""


def current() -> str | None:
    """The id of the request that is being answered here."""
    state = _state.get()
    return None if state is None else state["request_id"]


class RequestIds:
    """Middleware: puts the header on every response, and a line in the log for debugging, which has neither the query
    nor the headers: that is where keys are. The id is the client's, or what a route has chosen."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if VALID.match(given) else new_id("req")
        _state.set(state)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(id_headers(scope["path"], state["request_id"]))
                logger.debug("%s %s: %d", scope["method"], quote(scope["path"]), message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """Anthropic's clients look for the id in another header than OpenAI's."""
    form = format_of(path)
    return {HEADER: request_id} | ({} if form is None else {form.id_header: request_id})


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
