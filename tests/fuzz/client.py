"""Sends the cases to a server, many at once, and judges every answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import h11

from mlxpaged.api.error_format import without_version
from tests.fuzz import bodies, wire

LONGEST = 300.0  # seconds for an answer, on a machine that does other work too: one that takes longer hangs
SILENCE = 0.15
"""Seconds after which a client leaves a server that owes it no answer: the request is not complete."""
LARGE = 16_384  # bytes that are sent in one piece, but may not be received in one
ENDLESS = "/status/stream"
FAULTS = {"internal_error", "generation_failed", "engine_dead", "stalled"}
"""Codes of errors in streams, whose status is 200, that a mutated request must not get."""

Case = TypeVar("Case")


class FaultError(AssertionError):
    """An answer that should not be."""


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0]


@dataclass
class Target:
    """The server. ids: the ones that it has named last, by the parameter of a path."""

    url: str
    key: str
    ids: dict[str, str] = field(default_factory=lambda: dict.fromkeys(bodies.IDS, "none") | {"model": "demo"})

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def note_ids(self, answer: Answer) -> None:
        """Deleted and finished things stay: to name them is a case too."""
        if answer.status != 200 or answer.media_type != "application/json":
            return
        value = json.loads(answer.body)
        found = value.get("id") if isinstance(value, dict) else None
        for kind, prefix in (("file_id", "file-"), ("batch_id", "batch_"), ("response_id", "resp_")):
            if isinstance(found, str) and found.replace("_", "-").startswith(prefix.replace("_", "-")):
                self.ids[kind] = found

    def fill(self, text: str) -> str:
        for name, value in self.ids.items():
            text = text.replace(f"{{{name}}}", value)
        return text


@dataclass
class Report:
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)  # and the number of the case
    statuses: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)  # by the number of the case

    @property
    def table(self) -> str:
        count = sum(self.statuses.values())
        statuses = ", ".join(f"{status}: {number}" for status, number in sorted(self.statuses.items()))
        seconds, number = self.slowest
        return f"{count} in {self.seconds:.0f} s, the slowest {seconds:.1f} s (case {number}); {statuses}"


async def send_all(
    send: Callable[[int], Awaitable[str]], numbers: Iterable[int], concurrency: int, most_failures: int = 20
) -> Report:
    """send: returns what the case came to, or raises FaultError."""
    report, source, start = Report(), iter(numbers), time.monotonic()

    async def worker() -> None:
        for number in source:
            sent = time.monotonic()
            try:
                outcome = await send(number)
            except (FaultError, OSError) as error:
                outcome = "failed"
                report.failures[number] = f"{type(error).__name__}: {error}"
            report.statuses[outcome] += 1
            report.slowest = max(report.slowest, (time.monotonic() - sent, number))
            if len(report.failures) >= most_failures:
                return

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    report.seconds = time.monotonic() - start
    return report


# -- answers -----------------------------------------------------------------------------------------------------------


async def read_answer(
    reader: asyncio.StreamReader, method: bytes, rest: bytes = b"", silence: float = LONGEST, endless: bool = False
) -> tuple[Answer | None, bytes]:
    """The next answer to a request of this method, and what was received after it. None: the server has closed the
    connection, or said nothing for so long. endless: the first piece of the body is enough. Raises FaultError, and
    ConnectionError if the server reset the connection."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method or b"GET", target=b"/", headers=[(b"Host", b"x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(rest) if rest else None
    answer: Answer | None = None
    pieces = bytearray()
    deadline = time.monotonic() + silence
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            if not connection.trailing_data[0] and answer is None and connection.trailing_data[1]:
                return None, b""  # closed before an answer
            raise FaultError(f"the answer is no HTTP: {error}") from None
        if event is h11.NEED_DATA:
            try:
                data = await asyncio.wait_for(reader.read(65536), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                if answer is None and not connection.trailing_data[0]:
                    return None, b""
                raise FaultError("the answer began and was not complete in time") from None
            connection.receive_data(data)
            deadline = max(deadline, time.monotonic() + 1) if silence < LONGEST else deadline
        elif isinstance(event, h11.Response):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
            answer = Answer(event.status_code, headers)
            if silence < LONGEST:  # no answer was due, but one that has begun has to end
                deadline = time.monotonic() + LONGEST
        elif isinstance(event, h11.Data):
            pieces += event.data
            if endless:
                break
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
            break
    if answer is not None:
        answer.body = bytes(pieces)
    return answer, connection.trailing_data[0]


def judge(answer: Answer, path: str, method: str) -> str:
    """The status, as text. Raises FaultError. path: of the request, or "" for one that no handler saw."""
    status = answer.status
    if status >= 500 and status != 503:
        raise FaultError(f"status {status}: {answer.body[:600]!r}")
    if method == "HEAD" or status in (204, 304, 307):
        return str(status)
    if status == 416 or (status == 400 and answer.media_type == "text/plain"):
        return str(status)  # of Starlette: a range of a file, a preflight that is refused
    if status >= 400:
        if answer.media_type != "application/json":
            raise FaultError(f"status {status}: an error of type {answer.media_type}: {answer.body[:300]!r}")
        check_error(parsed(answer.body), path, status)
        if b"Traceback" in answer.body:
            raise FaultError(f"a traceback in an error: {answer.body[:300]!r}")
    elif answer.media_type == "application/json":
        parsed(answer.body)
    elif answer.media_type == "text/event-stream":
        check_events(answer.body, path)
    elif answer.media_type == "application/x-ndjson":
        check_lines(answer.body)
    return str(status)


def parsed(body: bytes) -> Any:
    def refuse(name: str) -> None:
        raise FaultError(f"an answer has {name}, which is no JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except ValueError as error:
        raise FaultError(f"an answer is no JSON: {error}: {body[:300]!r}") from None


def check_error(body: Any, path: str, status: int) -> None:
    """The error has the format of the path's API."""
    short = without_version(unquote(path.partition("?")[0]))
    if f"{short}/".startswith(("/api/", "/systemone/")):
        fits = list(body) == ["error"] and isinstance(body["error"], str)
    elif f"{short}/".startswith("/messages/"):
        fits = list(body) == ["type", "error", "request_id"]
        fits = fits and list(body["error"]) in (["type", "message"], ["type", "message", "details"])
    else:
        beside = ["detail"] if f"{short}/".startswith("/decisions/") else []
        fits = list(body) == ["error", *beside] and list(body["error"]) == ["message", "type", "param", "code"]
    if not fits:
        raise FaultError(f"status {status}: an error in another format: {json.dumps(body)[:300]}")


def check_events(body: bytes, path: str) -> None:
    """Every event is JSON, and the last one ends the answer, or is an error that the request may cause."""
    last: Any = None
    for line in body.decode().split("\n"):
        if line.startswith("data: "):
            last = line[6:] if line == "data: [DONE]" else parsed(line[6:].encode())
            check_code(last)
        elif line and not line.startswith((":", "event: ")):
            raise FaultError(f"a line of a stream that is no event: {line[:300]!r}")
    kind = last.get("type") if isinstance(last, dict) else None
    ends = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")
    if last != "[DONE]" and kind not in ends and not (isinstance(last, dict) and "error" in last):
        raise FaultError(f"a stream without an end: {body[-300:]!r}")


def check_lines(body: bytes) -> None:
    lines = [parsed(line) for line in body.splitlines()]
    if not lines or not (lines[-1].get("done") or "error" in lines[-1]):
        raise FaultError(f"a stream without an end: {body[-300:]!r}")
    for line in lines:
        if "internal server error" in str(line.get("error")):
            raise FaultError(f"a stream failed: {line}")


def check_code(event: Any) -> None:
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict) and isinstance(event, dict) and isinstance(event.get("response"), dict):
        error = event["response"].get("error")
    if isinstance(error, dict) and (error.get("code") in FAULTS or "internal server error" in str(error)):
        raise FaultError(f"a stream failed: {json.dumps(event)[:500]}")


# -- the two kinds of cases --------------------------------------------------------------------------------------------


async def send_body(target: Target, case: bodies.Case) -> str:
    path = quote(target.fill(case.path), safe="/?&=%#;.-_~[]")
    body = target.fill(case.body.decode("latin-1")).encode("latin-1")
    names = {name.lower() for name, _ in case.headers}
    headers = [("Host", "127.0.0.1"), ("Connection", "close"), ("Content-Length", str(len(body)))]
    headers += [] if "authorization" in names else [("Authorization", f"Bearer {target.key}")]
    head = f"{case.method} {path} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in (*headers, *case.headers))
    reader, writer = await asyncio.open_connection(*target.address)
    try:
        with contextlib.suppress(ConnectionError):  # the answer may come before the end of the body
            writer.write(head.encode("latin-1", "replace") + b"\r\n" + body)
            await writer.drain()
        endless = without_version(path.partition("?")[0]).rstrip("/") == ENDLESS
        answer, rest = await read_answer(reader, case.method.encode(), endless=endless)
    finally:
        writer.close()
    if answer is None:
        raise FaultError(f"no answer within {LONGEST:.0f} s, or the connection was closed without one")
    if endless:
        return "endless"
    if rest:
        raise FaultError(f"the connection has more after the answer: {rest[:100]!r}")
    outcome = judge(answer, path, case.method)
    target.note_ids(answer)
    return outcome


async def send_wire(target: Target, case: wire.Wire) -> str:
    reader, writer = await asyncio.open_connection(*target.address)
    pieces = case.pieces
    try:
        with contextlib.suppress(OSError):  # the answer may come before all is sent
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if case.end is wire.End.HALF_CLOSE:
                writer.write_eof()
            if case.end is wire.End.RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if case.end in (wire.End.CLOSE, wire.End.RESET):
            return "left"
        if case.end is wire.End.HALF_CLOSE:  # the server takes it for the end of the connection
            with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(), SILENCE)
            return "left"
        return await read_answers(reader, case, len(pieces) != 1 or len(pieces[0]) > LARGE)
    finally:
        writer.close()


async def read_answers(reader: asyncio.StreamReader, case: wire.Wire, may_be_reset: bool) -> str:
    """may_be_reset: the server refuses what it has received and closes the connection while the client still sends.
    Then the client's system may drop the answer."""
    outcome, rest = "no answer due", b""
    for i, method in enumerate((*case.methods, b"")):
        is_due = i == 0 and case.is_due
        try:
            answer, rest = await read_answer(reader, method, rest, LONGEST if is_due else SILENCE)
        except ConnectionError:
            if is_due and not may_be_reset:
                raise FaultError("the connection was reset") from None
            return "reset"
        if answer is None:
            if is_due and case.methods[0] != b"CONNECT":
                raise FaultError(f"no answer within {LONGEST:.0f} s, or the connection was closed without one")
            break
        outcome = judge(answer, "", method.decode("latin-1"))
        if answer.headers.get("connection") == "close":
            break
    return outcome


async def canary(target: Target, until: asyncio.Event, pause: float = 0.5) -> int:
    """Asks the same again and again. Returns how many answers were right. Raises FaultError if one is not. One may be
    refused because the queue is full, or ended because a case ends all requests."""
    body = {"prompt": "What is 17 + 25?", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True}
    data = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}\r\n"
    head += f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    first: str | None = None
    right = 0
    while not until.is_set() or right < 2:
        reader, writer = await asyncio.open_connection(*target.address)
        writer.write(head.encode() + data.encode())
        answer, _ = await read_answer(reader, b"POST")
        writer.close()
        if answer is None:
            raise FaultError("the canary has no answer")
        text = canary_text(answer)
        if text is not None:
            first = first or text
            if text != first:
                raise FaultError(f"the canary's answer was {first!r} and is {text!r}")
            right += 1
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(until.wait(), pause)
    return right


def canary_text(answer: Answer) -> str | None:
    """None: the request was refused, or ended by another."""
    if answer.status in (503, 499):
        return None
    if answer.status != 200:
        raise FaultError(f"the canary got {answer.status}: {answer.body[:300]!r}")
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    error = next((event["error"] for event in events if "error" in event), None)
    if error is not None:
        if error["code"] not in ("request_cancelled", "loading"):
            raise FaultError(f"the canary got {error}")
        return None
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])
