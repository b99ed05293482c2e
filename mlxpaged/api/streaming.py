"""Sends responses that take a while, and ends their work if the client leaves."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlxpaged.api import ignored_fields
from mlxpaged.api.body import read_json
from mlxpaged.api.error_format import format_of
from mlxpaged.api.errors import CLIENT_CLOSED_REQUEST, ApiError, from_engine, note_refusal
from mlxpaged.api.server import Load, server_of

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
Respond = Callable[[Request, Model], Coroutine[Any, Any, Response]]


class Beginning(ABC):
    """Events of a stream that waits for its model. Some clients count events only."""

    @abstractmethod
    def __init__(self, request_id: str, model: str, named: str | None) -> None:
        """model: the name of the model. named: what the request calls it."""

    @abstractmethod
    def go_on(self) -> str:
        """Returns an event that adds nothing."""

    def fail(self, error: ApiError) -> str | None:
        """Returns the last events; None: there is one, with the body of the error."""
        return None


EVENTS, LINES = "text/event-stream", "application/x-ndjson"
"""Media types of streams: server-sent events, and lines of JSON."""

LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Python's `str.splitlines` ends a line at these too, and so does `iter_lines` of httpx, by which Ollama's client reads
a stream. JSON escapes all other ends of lines."""

LOADING_SECONDS = 1.0
"""A stream that waits for its model says this often how far the load is."""


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


def handler(
    model: type[Model], respond: Respond[Model], streams: str | None = None, begin: type[Beginning] | None = None
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """Returns a route that reads a body and responds to it. Its work ends when the client leaves. streams: the media
    type of a stream, if the body may ask for one. A stream for a model that is not loaded begins before the load.
    begin: makes its events until the answer begins; None: there are none."""

    async def handle(request: Request) -> Response:
        body = await read_json(request, model)
        response: Response | None = None
        if streams is not None and wants_stream(body):
            named: str | None = getattr(body, "model", None)
            load = await server_of(request).begin_load(request, named, getattr(body, "service_tier", None))
            if load is not None:
                request.state.has_begun = True  # its headers are sent before the handler is called
                request.state.beginning = begin and begin(request.state.request_id, load.model.name, named)
                work = respond(request, body)

                def close() -> None:
                    work.close()
                    load.leave()

                response = EventStream(after_loading(request, load, work, streams), close, streams)
        if response is None:
            response = await unless_disconnected(request.receive, respond(request, body))
        if response is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        response.headers.update(ignored_fields.header(request))
        return response

    return handle


def event(data: Any) -> str:
    """Returns one server-sent event with `data` as JSON."""
    return f"data: {one_line(data)}\n\n"


def line(data: Any) -> str:
    """Returns `data` as one line of JSON."""
    return f"{one_line(data)}\n"


def one_line(data: Any) -> str:
    """Returns `data` as JSON in which no reader sees the end of a line."""
    return without_ends(to_json(data).decode())


def without_ends(text: str) -> str:
    """Returns JSON without the line ends that a text in it may have."""
    if not text.isascii():
        for end, escaped in LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def comment(text: str) -> str:
    """Returns a line that every reader of server-sent events skips. It is part of the event after it: an empty line
    would end an event without data, which some readers take for one."""
    return f": {text}\n"


def named_event(data: dict[str, Any]) -> str:
    """Returns an event whose name is its type."""
    return f"event: {data['type']}\n{event(data)}"


def wants_stream(body: BaseModel) -> bool:
    """Ollama's requests stream unless they say otherwise, or ask to unload the model."""
    return not getattr(body, "unloads", False) and bool(getattr(body, "streams", getattr(body, "stream", False)))


async def after_loading(
    request: Request, load: Load, respond: Coroutine[Any, Any, Response], media_type: str
) -> AsyncGenerator[str, None]:
    """Yields comments that say how far the load is, then the events of the response. Lines have no comments."""
    beginning: Beginning | None = request.state.beginning
    silent_since, longest = time.monotonic(), server_of(request).http.keep_alive_seconds
    try:
        with load.model.wanted():  # until the request is submitted
            while not load.done:
                if media_type == EVENTS:
                    yield comment(load.progress)
                if beginning is not None and time.monotonic() - silent_since >= longest:
                    yield beginning.go_on()
                    silent_since = time.monotonic()
                await load.wait(LOADING_SECONDS)
            load.raise_if_failed()
            response = await respond
    except Exception as error:
        yield error_events(from_engine(error), request, media_type, beginning)
        return
    if not isinstance(response, EventStream):  # a request that only loads the model
        yield f"{bytes(response.body).decode()}\n"
        return
    try:
        async for text in response.events:
            yield text
    finally:
        await response.aclose()


def error_events(error: ApiError, request: Request, media_type: str, beginning: Beginning | None = None) -> str:
    """A stream that failed before its answer began, in the API's format."""
    note_refusal(error, request.scope)
    form, request_id = format_of(request.url.path), request.state.request_id
    if beginning is not None and (events := beginning.fail(error)) is not None:
        return events
    body = error.body() if form is None else form.body(error, request_id)
    if media_type == LINES:
        return line(body)
    return named_event(body) if "type" in body else event(body)


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
        self.events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self.events.aclose()
        self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for text in self.events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
