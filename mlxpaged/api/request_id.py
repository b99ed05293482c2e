"""Gives each request an id, which is in the header X-Request-Id of its response and in its lines of the log."""

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
RESPONSE_PREFIX = "resp_"
VALID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
"""The ids "." and ".." are not valid: clients remove them from the URL that names the request."""

_state: ContextVar[dict[str, Any] | None] = ContextVar("request_state", default=None)
"""State of the request that this task answers; its id may still change."""


def current() -> str | None:
    """Returns the id of the request that the current task answers."""
    state = _state.get()
    return None if state is None else state["request_id"]


class RequestIds:
    """Middleware that sets the header of every response. The id is the client's, unless a handler chooses another one.
    The debug line in the log has neither the query nor the headers, because they can contain keys."""

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
                form = format_of(scope["path"])  # Anthropic's clients look for the id in another header than OpenAI's
                for name in (HEADER,) if form is None else (HEADER, form.id_header):
                    MutableHeaders(scope=message)[name] = state["request_id"]
                logger.debug("%s %s: %d", scope["method"], quote(scope["path"]), message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


def new_id(prefix: str) -> str:
    """Returns a new id. A prefix that ends with "_" gets no "-" after it."""
    return f"{prefix}{'' if prefix.endswith('_') else '-'}{uuid.uuid4().hex}"


def response_id_of(request_id: str) -> str:
    """Returns the id of a response. A client may have chosen that of the request: VS Code always does. But it continues
    only responses whose ids begin as OpenAI's, as LangChain does."""
    return request_id if request_id.startswith(RESPONSE_PREFIX) else f"{RESPONSE_PREFIX}{request_id}"
