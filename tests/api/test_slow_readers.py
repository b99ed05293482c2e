"""Clients that do not read their answer, or slowly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.cli.http_protocol import CHECKS, HttpProtocol
from tests.api.helpers import DEADLINE, StepGate, answer_text, ask, finish_round, run_on
from tests.support import RunningServer, wait_until

CHAT = "/v1/chat/completions"
LONG = 3000
END = b"0\r\n\r\n"


@pytest.fixture
def protocols() -> list[HttpProtocol]:
    """Of the connections since the test began."""
    return []


@pytest.fixture
def server(
    demo_server: RunningServer, protocols: list[HttpProtocol], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningServer]:
    """The system takes over little of what is sent, so the server notices at once that the client does not read."""
    made = HttpProtocol.connection_made

    def narrow(self: HttpProtocol, transport: asyncio.Transport) -> None:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        protocols.append(self)
        made(self, transport)

    monkeypatch.setattr(HttpProtocol, "connection_made", narrow)
    limit_writes(demo_server, monkeypatch, 0.6)
    yield demo_server
    demo_server.wait_idle()


def limit_writes(server: RunningServer, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    state = server.app.state.server
    monkeypatch.setattr(state, "http", dataclasses.replace(state.http, write_timeout=seconds))


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


def read(connection: socket.socket, received: bytes = b"", more: int = 2**31) -> bytes:
    """What was received before, and all that comes, or about so many bytes of it."""
    most = len(received) + more
    with contextlib.suppress(ConnectionResetError):
        while len(received) < most and not received.endswith(END) and (piece := connection.recv(32768)):
            received += piece
    return received


def test_a_stream_that_is_not_read_is_ended_and_its_blocks_are_free(
    server: RunningServer, protocols: list[HttpProtocol]
) -> None:
    before = server.engine.stats.generated_tokens_total
    with StepGate(server) as gate, asking(server, LONG, stream=True) as connection:
        gate.allow(100)
        wait_until(lambda: protocols and protocols[0].transport.is_closing())
        wait_until(lambda: not list(server.app.state.server.open_requests))
        finish_round(server)
        gate.open()
        server.wait_idle()
        received = read(connection)
    assert b"200 OK" in received
    assert b"[DONE]" not in received
    assert 0 < server.engine.stats.generated_tokens_total - before <= 101
    assert answer_text(server, run_on("Once", 4))


def test_an_answer_that_is_not_read_is_dropped(server: RunningServer, protocols: list[HttpProtocol]) -> None:
    with asking(server, 120, stream=False) as connection:
        wait_until(lambda: protocols and protocols[0].transport.is_closing())
        received = read(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    assert length > 100_000 > len(body)


def test_a_slow_reader_gets_the_whole_answer(
    server: RunningServer, protocols: list[HttpProtocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than the limit in all, but never stops reading for so long: the server checks each time that 32
    KB were read."""
    limit_writes(server, monkeypatch, CHECKS * DEADLINE)
    checks, received = 0, b""

    async def check() -> bool:
        waits = protocols[0].check is not None
        if waits:
            protocols[0].end_check()
            protocols[0].check_reader()
        return waits

    with asking(server, 200, stream=True) as connection:
        wait_until(lambda: protocols and protocols[0].check is not None)
        server.wait_idle()
        while not received.endswith(END):
            before = len(received)
            received = read(connection, received, 32 * 1024)
            assert len(received) > before
            checks += server.run(check()).result(DEADLINE)
    assert checks > CHECKS
    assert b"[DONE]" in received
