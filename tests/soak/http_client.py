"""A small HTTP client: what it costs must not hide what the server does. One connection is one `Connection`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

SECONDS = 120.0
"""A client that waits longer for the next piece of an answer counts as hung."""


class HungError(Exception):
    """The server did not answer in time."""


class LeftError(Exception):
    """The server closed the connection within an answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, without [DONE]. Raises ValueError."""
        lines = [line[5:].strip() for line in self.body.splitlines() if line.startswith(b"data:")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]


class Connection:
    """Sends one request after the other to 127.0.0.1. It connects at the first one, and again after an answer that
    ended the connection.

    Every method raises HungError, LeftError or OSError.
    """

    def __init__(self, port: int, key: str | None = None) -> None:
        self.port = port
        self.key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = SECONDS
    ) -> Answer:
        """Sends a request and reads its answer whole. body: bytes, or what becomes JSON."""
        status, found = await self.begin(method, path, body, headers, seconds)
        pieces = [piece async for piece in self.pieces(found, seconds)]
        if found.get("connection") == "close":
            self.close()
        return Answer(status, found, b"".join(pieces))

    async def begin(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, seconds: float = SECONDS
    ) -> tuple[int, dict[str, str]]:
        """Sends a request and reads the head of its answer: status and headers. The body is read by `pieces`."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        key = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        given = {"Host": f"127.0.0.1:{self.port}", "Content-Type": "application/json"} | key | (headers or {})
        fields = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        length = f"Content-Length: {len(content)}\r\n" if content or method == "POST" else ""
        head = f"{method} {path} HTTP/1.1\r\n{fields}{length}\r\n".encode()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port)
        self._streams[1].write(head + content)
        try:
            lines = (await self._read(self._streams[0].readuntil(b"\r\n\r\n"), seconds)).decode("latin-1").split("\r\n")
        except BaseException:
            self.close()
            raise
        pairs = (line.split(":", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in pairs}

    async def pieces(self, headers: dict[str, str], seconds: float = SECONDS) -> AsyncIterator[bytes]:
        """The body of the answer that `begin` began, as it comes."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            if "content-length" in headers:
                yield await self._read(reader.readexactly(int(headers["content-length"])), seconds)
            while headers.get("transfer-encoding") == "chunked":
                size = int(await self._read(reader.readuntil(b"\r\n"), seconds), 16)
                piece = await self._read(reader.readexactly(size + 2), seconds)
                if size == 0:
                    break
                yield piece[:-2]
        except BaseException:
            self.close()
            raise

    async def _read(self, reading: Any, seconds: float) -> bytes:
        try:
            found: bytes = await asyncio.wait_for(reading, seconds)
        except asyncio.TimeoutError:
            raise HungError(f"nothing came for {seconds:.0f} s") from None
        except asyncio.IncompleteReadError:
            raise LeftError("the server closed the connection") from None
        return found

    def close(self) -> None:
        """At once, whatever the server still sends."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
