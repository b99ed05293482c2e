"""Sends responses that take a while, and ends their work if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxpaged.api import ignored_fields
from mlxpaged.api.body import read_json
from mlxpaged.api.errors import CLIENT_CLOSED_REQUEST

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
Respond = Callable[[Request, Model], Coroutine[Any, Any, Response]]

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams: server-sent events, and lines of JSON."""


async def disconnected(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Returns the result of `work`, or None if the client leaves first. `work` is then cancelled, and has ended."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def handler(model: type[Model], respond: Respond[Model]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Returns a route that reads a body and responds to it. Its work ends when the client leaves."""

    async def handle(request: Request) -> Response:
        body = await read_json(request, model)
        response = await unless_disconnected(request.receive, respond(request, body))
        if response is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        response.headers.update(ignored_fields.header(request))
        return response

    return handle


def event(data: Any) -> str:
    """Returns one server-sent event with `data` as JSON."""
    return f"data: {to_json(data).decode()}\n\n"


def line(data: Any) -> str:
    """Returns `data` as one line of JSON."""
    return f"{to_json(data).decode()}\n"


def comment(text: str) -> str:
    """Returns a line that every reader of server-sent events skips."""
    return f": {text}\n\n"


def named_event(data: dict[str, Any]) -> str:
    """Returns an event whose name is its type."""
    return f"event: {data['type']}\n{event(data)}"


class Silence:
    """Calls `wake` after each `seconds` in which the reader of a stream was sent nothing, until it is closed. A stream
    costs one timer, and an event one reading of the clock."""

    def __init__(self, seconds: float, wake: Callable[[], None]) -> None:
        self._seconds = seconds
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._check)
        self._since = self._loop.time()

    def end(self) -> None:
        """Something was sent."""
        self._since = self._loop.time()

    @property
    def is_long(self) -> bool:
        return self._loop.time() - self._since >= self._seconds

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        since = self._since
        if self.is_long:
            self._wake()
            since = self._loop.time()
        self._timer = self._loop.call_at(since + self._seconds, self._check)


class EventStream(Response):
    """Sends events, or lines, as they come. The status and the headers are sent at once, so a request that fails after
    this has its error as an event. It closes the iterator as soon as the client leaves, even if nothing has
    been sent: a request without a client must not stay in the queue."""

    def __init__(self, events: AsyncGenerator[str, None], close: Callable[[], None], media_type: str) -> None:
        """close: called at the end, in any case."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            await self._events.aclose()
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
