"""Changes uvicorn's protocol with h11: its own errors get the API's format, and silent connections are closed."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpaged.api.errors import ApiError, render
from mlxpaged.api.request_id import HEADER, new_id

HEAD_SECONDS = 30.0
"""Time limit for the head of a connection's first request. uvicorn limits only the time between two requests."""


class HttpProtocol(H11Protocol):
    """Uses h11 even if another parser is installed: h11 limits the size of a request's head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        """A silent connection must not use up the process's open files."""
        if self.cycle is None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP, and heads of more than 64 KiB. No handler sees these."""
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
