"""Reading a request: its body, bounded, JSON, and of the right shape, and the parameters of its URL."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from mlxpaged.api.errors import CLIENT_CLOSED_REQUEST, ApiError, from_validation
from mlxpaged.api.server import server_of

MAX_DISCARDED_BYTES = 512 * 1024 * 1024
"""Of a body that is too large, so much is read and thrown away: a client that is still sending when the connection
closes sees a broken pipe instead of the answer."""

BODY_SECONDS = 30.0
"""For a body to arrive, and a second more for each MIN_BYTES_PER_SECOND that did: no connection is held for ever by a
client that sends a byte now and then."""
MIN_BYTES_PER_SECOND = 64 * 1024

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Raises ApiError 413 for a body over the server's limit, which is not kept, and 400 for one that does not fit
    `model`."""
    body = bytearray()
    async for piece in pieces(request, server_of(request).http.max_body_bytes):
        body += piece
    request.state.body_size = len(body)
    return await server_of(request).prepare(request, lambda: parse(body, model))


class NoCollection(contextlib.ContextDecorator):
    """Nobody's garbage is collected meanwhile: the collector would go through what may be millions of new objects again
    and again as they become more, in all for longer than making them takes, and nothing else runs while it does.

    Entered by several threads at once; the last one out gives the collector back as the first one found it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._collects = False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._collects = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._collects:
                gc.enable()


no_collection = NoCollection()


@no_collection
def parse(body: bytes | bytearray, model: type[Model]) -> Model:
    """Raises ApiError 400.

    In two steps: `model_validate_json` makes objects of whatever it complains of or hands to Python once more, and all
    that in one go, while the time that Python takes for the second step is everybody's, 5 ms at a time.
    """
    try:
        value = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    return validate(value, model)


@no_collection
def validate(value: Any, model: type[Model]) -> Model:
    """Parsed JSON of the right shape. Raises ApiError 400."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def read_query(request: Request, model: type[Model]) -> Model:
    """The parameters of the URL. Raises ApiError 400 where they do not fit `model`."""
    return validate(dict(request.query_params), model)


async def pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """A body of at most `limit` bytes, as it comes. Raises ApiError 413 for a longer one, and 408 for one that comes
    too slowly."""
    expects_continue = request.headers.get("expect", "").lower() == "100-continue"
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit and expects_continue:
        raise too_large(limit)  # the client waits to hear whether it should send the body at all
    received = 0
    started = time.monotonic()
    stream = request.stream()
    try:
        while True:
            allowed = BODY_SECONDS + received / MIN_BYTES_PER_SECOND
            try:
                piece = await asyncio.wait_for(anext(stream), started + allowed - time.monotonic())
            except StopAsyncIteration:
                break
            except asyncio.TimeoutError:
                raise too_slow(received, allowed) from None
            received += len(piece)
            if received <= limit:
                yield piece
            elif received > limit + MAX_DISCARDED_BYTES:
                raise too_large(limit)
    except asyncio.CancelledError:  # the server's end came before that of the body
        raise ApiError(503, "the server is shutting down", "server_error", code="draining") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client left before the end of its request") from None
    if received > limit:
        raise too_large(limit)


def too_slow(received: int, seconds: float) -> ApiError:
    message = f"{received} bytes of the request body came in {seconds:.0f} s, and not its end"
    return ApiError(408, message, "timeout_error", "body", "body_timeout", headers={"Connection": "close"})


def too_large(limit: int) -> ApiError:
    mebibytes, rest = divmod(limit, 1024 * 1024)
    message = f"the request body is larger than {f'{limit} bytes' if rest else f'{mebibytes} MiB'}"
    return ApiError(413, message, param="body", code="body_too_large", headers={"Connection": "close"})
