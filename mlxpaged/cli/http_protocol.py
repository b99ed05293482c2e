"""HTTP on one connection: uvicorn's with h11, whose own answers take the API's format too."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpaged.api.errors import ApiError, render
from mlxpaged.api.request_id import HEADER, new_id

HEAD_SECONDS = 30.0
"""For the head of a connection's first request; uvicorn's own limit is for the time between two."""


class HttpProtocol(H11Protocol):
    """h11 by name, because its limit on the size of a head counts whatever else is installed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        """Whoever connects and asks for nothing must not use up the files that a process may open."""
        if self.cycle is None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP request, or one with a head of more than 64 KiB: no route will see it."""
        request_id = new_id("req")
        response = render(ApiError(400, msg, code="invalid_http"), "", request_id)
        headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.lower().encode(), request_id.encode())]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
