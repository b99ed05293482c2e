"""Clients that do not read their answer, or slowly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.cli.http_protocol import HttpProtocol
from tests.api.helpers import DEADLINE, answer_text, ask, run_on
from tests.support import RunningServer, wait_until

CHAT = "/v1/chat/completions"
LONG = 3000
TIMEOUT = 0.6


@pytest.fixture
def server(demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """The system takes over little of what is sent, so the server notices at once that the client does not read."""
    made = HttpProtocol.connection_made

    def narrow(self: HttpProtocol, transport: asyncio.Transport) -> None:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    state = demo_server.app.state.server
    monkeypatch.setattr(HttpProtocol, "connection_made", narrow)
    monkeypatch.setattr(state, "http", dataclasses.replace(state.http, write_timeout=TIMEOUT))
    yield demo_server
    demo_server.wait_idle()


@contextlib.contextmanager
def asking(server: RunningServer, num_tokens: int, stream: bool) -> Iterator[socket.socket]:
    """A chat with 4 KB of log-probabilities for each token, on a connection that takes little at once."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    body = httpx.Request("POST", server.url + CHAT, json=ask("Tell", max_tokens=num_tokens, stream=stream, **fields))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(DEADLINE)
        connection.connect((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body.content)}\r\n\r\n"
        connection.sendall(head.encode() + body.content)
        yield connection


def read(connection: socket.socket, pause: float = 0.0) -> bytes:
    """All that comes, in pieces with a pause between them."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(32768, socket.MSG_WAITALL if pause else 0):
            received += piece
            if received.endswith(b"0\r\n\r\n"):
                break
            time.sleep(pause)
    return received


def test_a_stream_that_is_not_read_is_ended_and_its_blocks_are_free(server: RunningServer) -> None:
    before = server.engine.stats.generated_tokens_total
    with asking(server, LONG, stream=True) as connection:
        wait_until(lambda: server.engine.num_unfinished == 1)
        server.wait_idle()
        received = read(connection)
    assert b"200 OK" in received
    assert b"[DONE]" not in received
    assert 0 < server.engine.stats.generated_tokens_total - before < LONG / 2
    assert answer_text(server, run_on("Once", 4))


def test_an_answer_that_is_not_read_is_dropped(server: RunningServer) -> None:
    with asking(server, 120, stream=False) as connection:
        wait_until(lambda: server.engine.num_unfinished == 1)
        server.wait_idle()
        time.sleep(2 * TIMEOUT)
        received = read(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    assert length > 100_000 > len(body)


def test_a_slow_reader_gets_the_whole_answer(server: RunningServer) -> None:
    """It takes longer than the limit in all, but never stops reading for so long."""
    started = time.monotonic()
    with asking(server, 60, stream=True) as connection:
        received = read(connection, TIMEOUT / 4)
    assert time.monotonic() - started > TIMEOUT
    assert b"[DONE]" in received
