"""Reads JSON bodies of limited size and the parameters of URLs, and checks them by pydantic models."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import threading
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from mlxpaged.api.errors import CLIENT_CLOSED_REQUEST, ApiError, from_validation
from mlxpaged.api.ignored_fields import client_of
from mlxpaged.api.reading import Reading
from mlxpaged.api.server import server_of

MAX_DISCARDED_BYTES = 512 * 1024 * 1024
"""This much is read beyond the limit: otherwise a client that still sends sees a broken pipe and no answer."""

BODY_SECONDS = 30.0
"""A body may take this long, and a second more for each MIN_BYTES_PER_SECOND received. A slow client has to end."""
MIN_BYTES_PER_SECOND = 64 * 1024
MAX_KEYS = 100_000
"""Keys in all objects of a body. A conversation of 10,000 messages has 20,000 to 80,000."""
MAX_VALUES = 1_200_000
"""Items of all arrays and objects of a body. A prompt may have a million tokens. Parsing takes up to 60 ns for each,
and no other thread runs meanwhile."""
CLOSE = {"Connection": "close"}  # the rest of the body is not read

Model = TypeVar("Model", bound=BaseModel)


async def read_json(request: Request, model: type[Model]) -> Model:
    """Reads a body. Raises ApiError 413 if it is over the server's limit, and 400 if it does not fit `model`.
    `ignored_fields.header` tells the client which of its fields were ignored."""
    server = server_of(request)
    body = bytearray()
    async for piece in pieces(request, server.http.max_body_bytes):
        body += piece
    request.state.body_size = len(body)
    reading = Reading(model, server.http.strict)
    parsed = await server.prepare(request, lambda: parse(body, model, reading))
    request.state.ignored = reading.ignored
    server.ignored_fields.note(client_of(request), reading.ignored)
    return parsed


_collected: list[bool] = []
"""One entry per thread inside `no_collection`: whether the collector has to be on after all have left."""
_collected_lock = threading.Lock()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turns the garbage collector off. While a body is parsed, it would traverse millions of new objects repeatedly:
    that takes longer than parsing and blocks all threads. The last thread to leave restores the collector's state."""
    with _collected_lock:
        _collected.append(gc.isenabled() or any(_collected))
        gc.disable()
    try:
        yield
    finally:
        with _collected_lock:
            if _collected.pop() and not _collected:
                gc.enable()


def parse(body: bytes | bytearray, model: type[Model], reading: Reading | None = None) -> Model:
    """Parses a body and checks it by `model`. Raises ApiError 400."""
    return or_raise(_parse(body, model, reading))


def validate(value: Any, model: type[Model], reading: Reading | None = None) -> Model:
    """Checks parsed JSON by `model`. Raises ApiError 400. reading: without one, unknown fields are refused."""
    return or_raise(_check(value, model, reading))


def or_raise(checked: Model | ApiError) -> Model:
    if isinstance(checked, ApiError):
        raise checked
    return checked


def parse_json(text: bytes | bytearray) -> Any:
    """Parses JSON that a client sent. Raises ValueError for what is no JSON, and ApiError for too many keys or values
    and for a number that is no finite float. The parser keeps the latest 16,384 short strings of the process. Only keys
    are repeated by other requests, so it does not keep the users' texts."""
    if text.startswith(BOM_UTF8):  # some programs write it before a text, and a parser may ignore it (RFC 8259, 8.1)
        text = text[len(BOM_UTF8) :]
    # No other thread runs while it is parsed. In JSON, a colon after a quote that is not escaped belongs to a key.
    if text.count(b":") > MAX_KEYS and text.count(b'":') - text.count(b'\\":') > MAX_KEYS:
        raise too_many_keys()
    check_num_values(text)
    value = from_json(text, cache_strings="keys", allow_inf_nan=False)
    check_values(value)
    return value


def check_num_values(text: bytes | bytearray) -> None:
    """Raises ApiError for JSON of more than MAX_VALUES items, before it is parsed. Each item but the first follows a
    comma, and the first one a bracket. Those within strings do not count. If there are many strings too, the text is
    refused without a look into them, which would take longer than parsing."""
    marks = (b",", b"[", b"{")
    if sum(map(text.count, marks)) <= MAX_VALUES:
        return
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') <= MAX_VALUES:
        outside = b"".join(plain.split(b'"')[::2])
        if sum(map(outside.count, marks)) <= MAX_VALUES:
            return
    raise ApiError(400, f"the body has more than {MAX_VALUES:,} values", code="too_many_values")


def check_values(value: Any) -> None:
    """Raises ApiError, see `parse_json`. The time of whatever handles the value later grows with its keys: rendering,
    serializing, and compiling a schema."""
    num_keys, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            num_keys += len(item)
            if num_keys > MAX_KEYS:
                raise too_many_keys()
            item = item.values()
        elif not isinstance(item, list):
            item = (item,)
        kinds = set(map(type, item))
        if float in kinds and not all(map(math.isfinite, (each for each in item if type(each) is float))):
            raise ApiError(400, "the body has a number that is too large: the limit is 1.8e308", code="invalid_json")
        if dict in kinds or list in kinds:
            waiting += (each for each in item if isinstance(each, (dict, list)))


def too_many_keys() -> ApiError:
    return ApiError(400, f"the body has more than {MAX_KEYS:,} keys in its objects", code="too_many_keys")


@no_collection()
def _parse(body: bytes | bytearray, model: type[Model], reading: Reading | None) -> Model | ApiError:
    """Returns an error instead of raising it: the stack of one that is raised keeps the parsed values until the client
    has its answer. The garbage collector is on again then, and traverses them three times.

    It takes two steps. `model_validate_json` would hold the interpreter lock all the time; during the second step here,
    other threads run every 5 ms.
    """
    try:
        value = parse_json(body)
    except ValueError as error:
        return ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json")
    except ApiError as error:
        return error.with_traceback(None)
    return _check(value, model, reading)


@no_collection()
def _check(value: Any, model: type[Model], reading: Reading | None) -> Model | ApiError:
    try:
        return model.model_validate(value, context=reading)
    except ValidationError as error:
        return from_validation(error)


def read_query(request: Request, model: type[Model]) -> Model:
    """Returns the parameters of the URL. Raises ApiError 400 if they do not fit `model`."""
    return validate(dict(request.query_params), model)


async def pieces(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of a body of at most `limit` bytes. Raises ApiError 413 if it is longer, 408 if it is slow."""
    expects_continue = request.headers.get("expect", "").lower() == "100-continue"
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit and expects_continue:
        raise too_large(limit)  # the client waits before it sends the body
    received, server = 0, server_of(request)
    started = server.now
    stream = request.stream()
    try:
        while True:
            allowed = BODY_SECONDS + received / MIN_BYTES_PER_SECOND
            try:
                piece = await asyncio.wait_for(anext(stream), started + allowed - server.now)
            except StopAsyncIteration:
                break
            except asyncio.TimeoutError:
                if server.now < started + allowed:  # the process was stopped: the rest may have arrived meanwhile
                    stream = request.stream()
                    continue
                message = f"the request body was not complete after {allowed:.0f} s; {received} bytes had arrived"
                raise ApiError(408, message, "timeout_error", "body", "body_timeout", CLOSE) from None
            received += len(piece)
            if received <= limit:
                yield piece
            elif received > limit + MAX_DISCARDED_BYTES:
                raise too_large(limit)
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client disconnected before the end of its request") from None
    if received > limit:
        raise too_large(limit)


def too_large(limit: int) -> ApiError:
    mebibytes, rest = divmod(limit, 1024 * 1024)
    message = f"the request body is larger than {f'{limit} bytes' if rest else f'{mebibytes} MiB'}"
    return ApiError(413, message, param="body", code="body_too_large", headers=CLOSE)
