"""Changes uvicorn's protocol with h11: its own errors get the API's format, silent connections are closed, and folded
header lines are refused."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpaged.api.errors import ApiError, render
from mlxpaged.api.request_id import HEADER, new_id

HEAD_SECONDS = 30.0
"""Time limit for the head of a connection's first request. uvicorn limits only the time between two requests."""

MAX_HEAD_BYTES = 64 * 1024
FOLDED = re.compile(rb"\n[ \t]")
"""The start of a line that continues the header line before it (obs-fold)."""


class Connection(h11.Connection):
    """Refuses a request whose head has a folded line, as RFC 9112, 5.2 requires. h11 itself joins such lines, but a
    proxy in front of the server may see two of them: then the two disagree on what the request is.

    fault: what is wrong with the request, if h11 does not see it.
    """

    fault: str | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError for what is no valid HTTP."""
        received, _ = self.trailing_data if self.their_state is h11.IDLE else (b"", False)
        event = super().next_event()
        if isinstance(event, h11.Request):
            rest, _ = self.trailing_data
            if FOLDED.search(received, 0, len(received) - len(rest)):
                self.fault = "a header is folded over several lines: send each header in one line"
                raise h11.RemoteProtocolError(self.fault)
        return event


class HttpProtocol(H11Protocol):
    """Uses h11 even if another parser is installed: h11 limits the size of a request's head."""

    conn: Connection

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Connection(h11.SERVER, MAX_HEAD_BYTES)

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
        response = render(ApiError(400, self.conn.fault or msg, code="invalid_http"), "", request_id)
        headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.lower().encode(), request_id.encode())]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
