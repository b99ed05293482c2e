"""HTTP over plain sockets: what a client of the server sees to the byte, and the answers of each API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]


@dataclass(frozen=True)
class Reply:
    """status: 0 if the connection ended before any. whole: whether the body ended as HTTP says it must."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        return f"{self.status}{'' if self.whole else ' (cut)'} {self.body[-300:]!r}"


def read_reply(data: bytes) -> Reply:
    """All that a connection has received, for one request."""
    head, end, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    if not end or not lines[0].startswith("HTTP/1.1 "):
        return Reply(0, {}, data, False)
    status = int(lines[0].split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if status == 100:
        return read_reply(rest)
    if headers.get("transfer-encoding") == "chunked":
        body, whole = bytearray(), False
        while True:
            size, end, after = rest.partition(b"\r\n")
            length = int(size, 16) if end else -1
            if length == 0:
                whole = after == b"\r\n"
            if length <= 0 or len(after) < length + 2:
                break
            body += after[:length]
            rest = after[length + 2 :]
        return Reply(status, headers, bytes(body), whole)
    return Reply(status, headers, rest, len(rest) == int(headers.get("content-length", len(rest))))


def head_of(method: str, path: str, length: int | None, headers: dict[str, str]) -> bytes:
    fields = {"Host": "127.0.0.1", "Connection": "close", **headers}
    if length is not None:
        fields["Content-Length"] = str(length)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def request_bytes(method: str, path: str, body: Any, headers: dict[str, str]) -> bytes:
    """body: JSON, bytes, or None for a request without one."""
    if body is None:
        return head_of(method, path, None, headers)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head_of(method, path, len(data), {"Content-Type": "application/json", **headers}) + data


class Connection:
    """One connection. It sends and reads what the caller says, and nothing else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, address: Address, receive_buffer: int | None = None) -> Connection:
        if receive_buffer is None:
            return cls(*await asyncio.open_connection(*address))
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, address)
        return cls(*await asyncio.open_connection(sock=plain, limit=receive_buffer))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, text: bytes) -> bytes:
        """All up to `text`, or up to the end."""
        received = b""
        while text not in received and (piece := await self._reader.read(65536)):
            received += piece
        return received

    async def read(self) -> bytes:
        """All up to the end of the connection, also if it is reset."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := await self._reader.read(65536):
                received += piece
        return received

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def start_reading(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """End the connection with RST."""
        plain = self._writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


async def exchange(address: Address, data: bytes) -> Reply:
    """Send bytes, and read until the server closes the connection."""
    connection = await Connection.open(address)
    try:
        with contextlib.suppress(ConnectionError):  # the answer may have come before the end of the request
            await connection.send(data)
        return read_reply(await connection.read())
    except asyncio.CancelledError:
        connection.reset()  # `close` would wait until all of a large body is sent
        raise
    finally:
        connection.close()


async def request(address: Address, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """headers: with underscores in place of dashes."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return await exchange(address, request_bytes(method, path, body, fields))


@dataclass(frozen=True)
class Answer:
    """What a client got of an answer. ended: why it ended, for each choice; empty if the answer has no end. error: the
    reason, if the answer ended with an error."""

    texts: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    error: str | None = None


def answer_of(path: str, reply: Reply) -> Answer:
    """The answer in a reply of 200, streamed or not."""
    is_events = reply.headers.get("content-type", "").startswith("text/event-stream")
    if is_events:
        found = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: {")]
    else:
        found = [line for line in reply.body.decode().split("\n") if line]
    events = [json.loads(line) for line in found]
    if path.startswith("/api/"):
        return ollama_answer(events)
    if path == "/v1/messages":
        return messages_answer(events) if is_events else Answer()
    if path == "/v1/responses":
        return responses_answer(events) if is_events else Answer()
    return openai_answer(events)


def reason_of(error: Any) -> str:
    """Of an error in any of the formats. Empty if it gives none."""
    body = error.get("error") if isinstance(error, dict) else None
    if isinstance(body, str):
        return body
    if not isinstance(body, dict) or body.get("code") == "internal_error":
        return ""
    return str(body.get("message") or "")


def openai_answer(events: list[Any]) -> Answer:
    texts: dict[int, str] = {}
    ended: dict[int, str] = {}
    for event in events:
        if "error" in event:
            return Answer(tuple(texts.values()), (), reason_of(event))
        for choice in event["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            index = choice["index"]
            text = "".join(part.get(name) or "" for name in ("text", "reasoning_content", "content"))
            texts[index] = texts.get(index, "") + text
            if choice.get("finish_reason"):
                ended[index] = choice["finish_reason"]
    order = sorted(texts)
    return Answer(tuple(texts[i] for i in order), tuple(ended[i] for i in order if i in ended))


def ollama_answer(events: list[Any]) -> Answer:
    text, ended = "", ""
    for event in events:
        if "error" in event:
            return Answer((text,), (), reason_of(event))
        text += event["message"]["content"] if "message" in event else event["response"]
        ended = event.get("done_reason") or ended
    return Answer((text,), (ended,) if ended else ())


def messages_answer(events: list[Any]) -> Answer:
    text, ended = "", ""
    for event in events:
        if event["type"] == "error":
            return Answer((text,), (), reason_of(event))
        if event["type"] == "content_block_delta":
            text += event["delta"].get("text") or event["delta"].get("thinking") or ""
        if event["type"] == "message_delta":
            ended = event["delta"]["stop_reason"]
    return Answer((text,), (ended,) if ended else ())


def responses_answer(events: list[Any]) -> Answer:
    text, ended = "", ""
    for event in events:
        if event["type"] == "error":
            return Answer((text,), (), str(event.get("message") or ""))
        if event["type"] == "response.failed":
            return Answer((text,), (), reason_of(event["response"]))
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        if event["type"] in ("response.completed", "response.incomplete"):
            ended = event["response"]["status"]
    return Answer((text,), (ended,) if ended else ())
