"""Changes uvicorn's protocol with h11. Its own errors get the API's format, and ambiguous heads are refused. The
number of connections is limited. A client that does not send or read is given up after a time."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpaged.api.errors import RETRY, ApiError, render
from mlxpaged.api.request_id import HEADER, new_id
from mlxpaged.api.server import Server

logger = logging.getLogger(__name__)

HEAD_SECONDS = 30.0
"""Time limit for the head of a connection's first request. uvicorn limits only the time between two requests."""

LEAST_BYTES = 16 * 1024
"""A client that takes less than this within the time limit counts as one that does not read."""
CHECKS = 4
"""Within the time limit. A check counts for a quarter of it, however late it comes: the process may be stopped."""
LINGER_SECONDS = 0.5
"""A connection that is refused waits so long for its request, and a connection stays so long after an answer that came
before the whole request. A socket that is closed while bytes arrive resets the connection, and its client may lose the
answer (RFC 9112, 9.6)."""
LINGERING_SHARE = 0.25
"""Refused connections that may stay for a moment, as a share of the open ones. Those beyond are closed at once."""
MAX_HEAD_BYTES = 64 * 1024
MAX_PIECES, PIECE_BYTES = 4096, 64
"""A body may come in so many pieces, and in one more for each so many bytes."""
ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE)
"""A target with the host in it, as clients send it to a proxy."""
FOLDED = re.compile(rb"\n[ \t]")
"""The start of a line that continues the header line before it (obs-fold)."""


BARE_FEED = re.compile(rb"(?<!\r)\n")
LENGTH = re.compile(rb"^content-length:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


class Connection(h11.Connection):
    """Refuses heads that a proxy in front of the server may read in another way: then the two disagree on what the
    request is. h11 ends a line at a line feed alone (RFC 9112, 2.2), joins folded lines (5.2), takes a Content-Length
    that is repeated with the same value (6.3), and chunks in HTTP 1.0, and ignores the Content-Length of a chunked body
    (6.1). It takes no empty lines before a request, which some clients send after a body (2.2); they are left out here.

    It also refuses bodies in tiny pieces, chunks or packets. Each piece takes 10 to 20 us: 1.5 MB in pieces of a byte
    took 12 s.

    fault: what is wrong with the request, if h11 does not see it. method: of the last request.
    """

    fault: str | None = None
    method = b""
    _num_pieces = _num_bytes = 0  # of the body so far

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError for what is no valid HTTP."""
        received = self._begun_head() if self.their_state in (h11.IDLE, h11.DONE) else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.method = event.method
            rest, _ = self.trailing_data
            names = {name for name, _ in event.headers}
            self.fault = fault_of(received[: len(received) - len(rest)], names, event.http_version)
            self._num_pieces = self._num_bytes = 0
            if b"upgrade" in names:  # each request of Java's client offers HTTP/2, of which uvicorn would warn twice
                event = without_upgrade(event)
            if (absolute := ABSOLUTE.fullmatch(event.target)) is not None:
                event = from_this_server(event, *absolute.groups())
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > MAX_PIECES + self._num_bytes // PIECE_BYTES:
                what = f"{self._num_bytes} bytes of the body came in {self._num_pieces} pieces"
                self.fault = f"{what}: send larger ones"
        if self.fault is not None:
            raise h11.RemoteProtocolError(self.fault)
        return event

    def _begun_head(self) -> bytes:
        """Returns what has come of the next request, after dropping the empty lines before it."""
        received, _ = self.trailing_data
        head = received.lstrip(b"\r\n")
        self._receive_buffer.maybe_extract_at_most(len(received) - len(head))
        return head


def fault_of(head: bytes, names: Collection[bytes], version: bytes) -> str | None:
    """Returns what a proxy may read in another way in the head of a request. names: of its headers."""
    lengths = LENGTH.findall(head)
    if FOLDED.search(head):
        return "a header is folded over several lines: send each header in one line"
    if BARE_FEED.search(head):
        return "a line ends with a line feed alone: end it with a carriage return and a line feed"
    if {b"content-length", b"transfer-encoding"} <= {*names}:
        return "the request has both Content-Length and Transfer-Encoding: send one of them"
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        return "the request has several lengths: send one Content-Length"
    if b"transfer-encoding" in names and version < b"1.1":
        return "the request has Transfer-Encoding in HTTP 1.0: use HTTP 1.1"
    return None


def without_upgrade(request: h11.Request) -> h11.Request:
    """Ignores the offer of another protocol, as a server may (RFC 9110, 7.8)."""
    kept = [(name, value) for name, value in request.headers if name != b"upgrade"]
    return h11.Request(method=request.method, target=request.target, headers=kept, http_version=request.http_version)


def from_this_server(request: h11.Request, host: bytes, target: bytes) -> h11.Request:
    """Takes the host from an absolute target, and ignores the header (RFC 9112, 3.2.2)."""
    others = [(name, value) for name, value in request.headers if name != b"host"]
    path = target if target.startswith(b"/") else b"/" + target
    return h11.Request(
        method=request.method, target=path, headers=[(b"host", host), *others], http_version=request.http_version
    )


REPLACED = (
    *("connection_made", "data_received", "connection_lost", "pause_writing", "resume_writing"),
    *("timeout_keep_alive_handler", "send_400_response"),
)
assert all(callable(getattr(H11Protocol, name, None)) for name in REPLACED)
"""uvicorn has no settings for what these methods do."""


class HttpProtocol(H11Protocol):
    """Uses h11 even if another parser is installed: h11 limits the size of a request's head."""

    conn: Connection
    _silence: asyncio.TimerHandle
    _is_refused = _lingers = False
    check: asyncio.TimerHandle | None = None  # of the reader, while data waits for it
    _unsent = _checks = 0  # bytes at the last check at which the client had read enough, and the checks since then

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Connection(h11.SERVER, MAX_HEAD_BYTES)

    @property
    def _server(self) -> Server:
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        return server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._server.http.max_open_connections
        self._is_refused = len(self.connections) > limit
        if self._is_refused:
            self._silence = self.loop.call_later(LINGER_SECONDS, self._refuse, b"")
        else:
            self._silence = self.loop.call_later(HEAD_SECONDS, self.close_if_silent)
        if len(self.connections) > (1 + LINGERING_SHARE) * limit:
            self._refuse(b"")
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        if self._is_refused:
            self._refuse(data)
            return
        super().data_received(data)  # stops the timer of the idle connection
        is_between = self.cycle is not None and self.cycle.response_complete and not self._lingers
        if is_between and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            # What came ended no head: the rest of a body that was answered before its end, or a part of the next head.
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silence, self.timeout_keep_alive_task):  # they would keep the connection's memory
            if timer is not None:
                timer.cancel()
        self.end_check()
        super().connection_lost(exc)

    def _refuse(self, received: bytes) -> None:
        """The files that the process may still open are for the model, uploads and the log. received: the begin of the
        request. Its path says in which API's format the error is."""
        message = "the server has as many open connections as its limit of open files allows"
        error = ApiError(503, message, "server_error", code="too_many_connections", headers=RETRY)
        self._server.metrics.count_refusal(error.refusal_code)
        _, target, *_ = [*received.split(maxsplit=2), b"", b""]
        self._answer(error, target.decode("latin-1").partition("?")[0])

    # -- clients that do not read ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """64 KiB wait for the client. The handler waits too, until `resume_writing`."""
        super().pause_writing()
        self._begin_check()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.end_check()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, after the client has taken the rest of the answer."""
        if not self.transport.is_closing():
            self._begin_check()
            super().timeout_keep_alive_handler()

    def _begin_check(self) -> None:
        self._unsent, self._checks = self.transport.get_write_buffer_size(), 0
        if self._unsent and self.check is None:
            self._check_later()

    def _check_later(self) -> None:
        if (limit := self._server.http.write_timeout) is not None:
            self.check = self.loop.call_later(limit / CHECKS, self.check_reader)

    def end_check(self) -> None:
        if self.check is not None:
            self.check.cancel()
            self.check = None

    def check_reader(self) -> None:
        """Nothing is added to what waits, so it shrinks by what the client takes."""
        unsent = self.transport.get_write_buffer_size()
        self._checks += 1
        if self._unsent - unsent >= LEAST_BYTES:
            self._unsent, self._checks = unsent, 0
        self.check = None
        if unsent and self._checks < CHECKS:
            self._check_later()
        elif unsent:
            self._abort(unsent)

    def _abort(self, unsent: int) -> None:
        """The handler sees a client that has left, and ends the request."""
        state = {} if self.cycle is None else self.cycle.scope.get("state", {})
        message = "%s: the client has not read for %.0f s; %d bytes were waiting for it"
        logger.info(message, state.get("request_id", "a connection"), self._server.http.write_timeout, unsent)
        self.transport.abort()

    def close_if_silent(self) -> None:
        """A silent connection must not use up the process's open files."""
        if self.cycle is None:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answers invalid HTTP, and heads of more than 64 KiB. No handler sees these. But a handler may be reading a
        body that turns out to be invalid, or may have begun its answer, which then ends with the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(ApiError(400, self.conn.fault or msg, code="invalid_http"))
        else:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.waiting_for_100_continue = False
            self.cycle.disconnected = True  # before `connection_lost`, so that the handler sends nothing in between
            self.cycle.message_event.set()

    def _answer(self, error: ApiError, path: str = "") -> None:
        """Answer without a handler, and let the connection end."""
        request_id = new_id("req")
        response = render(error, path, request_id)
        headers = [*response.raw_headers, (b"connection", b"close"), (HEADER.lower().encode(), request_id.encode())]
        body = b"" if self.conn.method == b"HEAD" and self.conn.our_state is h11.SEND_RESPONSE else bytes(response.body)
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def _linger(self) -> None:
        """Close when the client has closed its side, or after a moment. What it still sends is dropped."""
        self._lingers = True
        self.transport.write_eof()
        self._silence.cancel()
        self._silence = self.loop.call_later(LINGER_SECONDS, self.transport.close)
