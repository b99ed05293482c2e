"""Connections from their start to their first bytes. Their number is limited, and the time in which nothing comes. Then
`HttpProtocol` takes over, for few connections at a time: a burst of them must not hold up /health or the streams."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from mlxpaged.api.server import Server
from mlxpaged.cli.http_protocol import HEAD_SECONDS, LINGER_SECONDS, HttpProtocol

LINGERING_SHARE = 0.25
"""Refused connections that may stay for a moment, as a share of the open ones. Those beyond are closed at once."""
AT_A_TIME = 8
"""Requests that begin in one round of the event loop: 0.4 ms each on a CPU of 2023."""
LONGEST_TURN_SECONDS = 0.25
"""The longest that a request in a burst of connections waits for those that come after it."""
HEALTH = b"GET /health "


class ConnectionFactory:
    """uvicorn calls it for each connection of a server, as it would call a class of protocols."""

    def __init__(self) -> None:
        self._waiting = deque[tuple[float, AcceptedConnection, bytes]]()
        self._has_accepted = False  # in this round

    def __call__(self, **options: Any) -> AcceptedConnection:
        self._has_accepted = True
        return AcceptedConnection(self, options)

    def begin_in_turn(self, connection: AcceptedConnection, received: bytes) -> None:
        """uvloop accepts one connection in a round. A probe of /health can be behind many others, so all are accepted
        before the requests begin."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin_some, loop)
        self._waiting.append((loop.time() + LONGEST_TURN_SECONDS, connection, received))

    def _begin_some(self, loop: asyncio.AbstractEventLoop) -> None:
        at_a_time = AT_A_TIME
        if self._has_accepted:
            at_a_time = 1 if loop.time() > self._waiting[0][0] else 0
            self._has_accepted = False
        for _ in range(min(at_a_time, len(self._waiting))):
            _, connection, received = self._waiting.popleft()
            loop.call_soon(connection.begin, received)  # an exception ends only this one
        if self._waiting:
            loop.call_soon(self._begin_some, loop)


class AcceptedConnection(asyncio.Protocol):
    """It takes a third of the time that an `HttpProtocol` takes to make."""

    _transport: asyncio.Transport
    end_of_wait: asyncio.TimerHandle

    def __init__(self, factory: ConnectionFactory, options: dict[str, Any]) -> None:
        """options: of `HttpProtocol`."""
        self._factory = factory
        self._options = options
        self._connections: set[Any] = options["server_state"].connections
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._connections.add(self)
        loop = asyncio.get_running_loop()
        server: Server = self._options["config"].app.state.server
        limit = server.http.max_open_connections
        self._is_refused = len(self._connections) > limit
        if self._is_refused:
            self.end_of_wait = loop.call_later(LINGER_SECONDS, self.begin, b"")
        else:  # a silent connection must not use up the process's open files
            self.end_of_wait = loop.call_later(HEAD_SECONDS, transport.close)
        if len(self._connections) > (1 + LINGERING_SHARE) * limit:
            self.begin(b"")
            transport.close()

    def data_received(self, data: bytes) -> None:
        if data.startswith(HEALTH):
            self.begin(data)
        else:
            self.end_of_wait.cancel()  # `begin` is called once
            self._transport.pause_reading()
            self._factory.begin_in_turn(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_of_wait.cancel()  # the timer would keep the connection's memory
        self._connections.discard(self)

    def shutdown(self) -> None:
        """uvicorn calls it when the server ends."""
        self._transport.close()

    def begin(self, received: bytes) -> None:
        """Let `HttpProtocol` go on. received: the begin of the first request."""
        self.end_of_wait.cancel()
        self._connections.discard(self)
        if self._transport.is_closing():
            return
        protocol = HttpProtocol(**self._options)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        self._transport.resume_reading()
        if self._is_refused:
            protocol.refuse(received)
        else:
            protocol.data_received(received)
