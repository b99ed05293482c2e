"""Middleware that refuses requests before a handler sees them, by their origin, number and API key.

Each raises ApiError. The middleware `Errors`, which is outside of them, answers it without reading the body.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxpaged.api.access.caller import Caller
from mlxpaged.api.access.key_ring import KeyRing
from mlxpaged.api.access.local_names import LOCAL_ORIGIN, is_local_name, is_loopback_name
from mlxpaged.api.access.rate_limit import Allowance
from mlxpaged.api.errors import RETRY, ApiError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
"""Limits header names and values, path and query together. h11 has the same limit for heads that come in pieces."""

HOST = re.compile(r"(?:\[(?P<ip>[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?)\]|(?P<name>[A-Za-z0-9_.-]*))(?::[0-9]{0,5})?\Z")
"""What a Host header may have. A letter that ends a host in a URL, such as # and /, could hide what another name is."""
NAME, ORIGIN = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*"), re.compile(r"null|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")
"""Values that an error message may give as that of a flag."""


class Origins:
    """Refuses requests of pages in a browser, unless the page's origin is allowed.

    Host: DNS rebinding makes a foreign name point to this machine; requests to that name are refused. Addresses are
    allowed, because a page can come from an address only if this server sent it. Origin: without this check the server
    would run the request of a foreign page. The browser would only hide the answer.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        """hosts: names beside the local ones. origins: for example http://localhost:3000, or *."""
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["path"])
        if size + len(scope["query_string"]) > MAX_HEADER_BYTES or len(scope["headers"]) > MAX_HEADERS:
            limit = f"more than {MAX_HEADERS} headers, or more than {MAX_HEADER_BYTES // 1024} KiB of headers and URL"
            raise ApiError(431, f"the request has {limit}", param="headers", code="headers_too_large")
        headers = Headers(scope=scope)
        host, origin = headers.get("host"), headers.get("origin")
        name = None if host is None else host_name(host)
        certain = name is not None and self._is_certain(name)
        if host is not None and not certain and (name is None or not is_local_name(name)):
            raise host_not_allowed(host, name)  # a request without Host is HTTP 1.0, which no browser speaks
        if origin is None or origin in self._origins or "*" in self._origins or LOCAL_ORIGIN.fullmatch(origin):
            return
        # Another machine of the network may have sent a page under a name that is only local by its form.
        if certain and host is not None and netloc(origin) == host.lower():
            return
        raise origin_not_allowed(origin)

    def _is_certain(self, name: str) -> bool:
        """Whether a page under this name can only have come from this server, or the user has allowed the name."""
        return is_loopback_name(name) or is_address(name) or name in self._hosts or "*" in self._hosts


def host_name(host: str) -> str | None:
    """Returns the name or address in a Host header, in lower case; None if the header is malformed."""
    found = HOST.match(host)
    return None if found is None else (found["ip"] or found["name"] or "").lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def host_not_allowed(host: str, name: str | None) -> ApiError:
    named = name if name is not None and NAME.fullmatch(name) else None
    remedy = f"to allow it, start the server with --allowed-host {named or 'NAME'}"
    message = f"the Host header names {host!r}, which is not a name of this server; {remedy}"
    return ApiError(403, message, "permission_error", "Host", "host_not_allowed", reason=message if named else None)


def origin_not_allowed(origin: str) -> ApiError:
    named = origin if ORIGIN.fullmatch(origin) else None
    remedy = f"to allow them, start the server with --cors-origin {named or 'ORIGIN'}"
    message = f"pages from {origin!r} may not use this server; {remedy}"
    return ApiError(403, message, "permission_error", "Origin", "origin_not_allowed", reason=message if named else None)


MAX_PRESENTED = 2
"""Some clients send their key in both headers."""


class RequestLimit:
    """Answers at most `limit` requests at once, streams included; the next ones get a 503."""

    def __init__(self, app: ASGIApp, limit: int, open_paths: Collection[str]) -> None:
        self._app = app
        self._limit = limit
        self._open_paths = open_paths
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        if self._in_flight >= self._limit:
            message = f"the server is answering {self._in_flight} requests, the limit that --max-connections sets"
            raise ApiError(503, message, "server_error", code="too_many_connections", headers=RETRY)
        self._in_flight += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1


class KeyCheck:
    """Sets `request.state.caller` to the key's owner (None on a server without keys), and counts the request."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["state"]["caller"] = None
            if self._keys is not None and scope["path"] not in self._open_paths:
                caller = identify(self._keys, Headers(scope=scope))
                caller.meter.touch()
                if scope["method"] == "POST":  # a key over its limit can still see and end its requests
                    count(caller.allowance)
                    send = with_headers(send, caller.allowance)
                scope["state"]["caller"] = caller
        await self._app(scope, receive, send)


def identify(keys: KeyRing, headers: Headers) -> Caller:
    """Finds the caller by `Authorization: Bearer` or `x-api-key`. Raises ApiError 401 if neither has a known key. A key
    is compared with the hashes of all, which can take a millisecond, so no more than MAX_PRESENTED are looked at."""
    presented = [value.strip() for value in headers.getlist("x-api-key")]
    for value in headers.getlist("authorization"):
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "bearer":
            presented.append(credentials.strip())
    for key in list(filter(None, presented))[:MAX_PRESENTED]:
        caller = keys.find(key)
        if caller is not None:
            return caller
    if any(presented):
        message, code, challenge = "this server does not know the API key", "invalid_api_key", ', error="invalid_token"'
    else:
        message = "this server needs an API key; send it as Authorization: Bearer KEY or x-api-key: KEY"
        code, challenge = "missing_api_key", ""
    headers_of_answer = {"WWW-Authenticate": f'Bearer realm="mlxpaged"{challenge}'}
    raise ApiError(401, message, "authentication_error", code=code, headers=headers_of_answer)


def count(allowance: Allowance) -> None:
    """Take one request from the allowance. Raises ApiError 429 with the time to wait if a limit is reached."""
    name = allowance.exhausted()
    if name is None:
        return allowance.take("requests", 1)
    wait = allowance.wait(name)
    message = f"this key's limit of {allowance.limits[name]} {name} per minute is reached; try again in {wait:.3f} s"
    after = {"Retry-After": str(math.ceil(wait)), "Retry-After-Ms": str(math.ceil(wait * 1000))}
    raise ApiError(429, message, name, code="rate_limit_exceeded", headers=after | allowance.headers())


def with_headers(send: Send, allowance: Allowance) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(allowance.headers())
        await send(message)

    return send_with_headers
