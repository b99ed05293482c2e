"""What the soak must notice, without a server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.soak.__main__ import ERRORS, unbalanced
from tests.soak.cases import Case, make_cases, same
from tests.soak.http_client import Answer, Connection, HungError, LeftError
from tests.soak.jobs import Client, Refused, Wrong, batch, check, error_in
from tests.soak.slopes import slope, without_step


def found(body: dict[str, Any]) -> Answer:
    return Answer(200, {}, json.dumps(body).encode())


def stream(*events: dict[str, Any]) -> Answer:
    return Answer(200, {}, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))


def chunk(text: str, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": reason}]}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in make_cases(random.Random(0), ("small",), 1)}


def test_a_wrong_answer_is_noticed_streamed_or_not(cases: dict[str, Case]) -> None:
    case = cases["chat-small-0"]
    whole = found({"choices": [{"message": {"content": "blue"}, "finish_reason": "stop"}]})
    expected = case.read(whole)
    check(case, expected, whole)
    check(case, expected, stream(chunk("bl"), chunk("ue"), chunk("", "stop")), streams=True)
    wrong = found({"choices": [{"message": {"content": "blu"}, "finish_reason": "stop"}]})
    for answer, streams in ((wrong, False), (stream(chunk("blue", "length")), True), (found({}), False)):
        with pytest.raises(Wrong):
            check(case, expected, answer, streams)


def test_floats_may_differ_by_rounding_only() -> None:
    assert same([[0.5, 0.25]], [[0.5, 0.2501]])
    assert not same([[0.5, 0.25]], [[0.5, 0.26]])
    assert not same([[0.5, 0.25]], [[0.5]])


def test_the_error_at_the_end_of_a_stream_is_found() -> None:
    assert error_in(stream(chunk("a"), chunk("", "stop"))) is None
    assert error_in(stream(chunk("a"), {"error": {"message": "cancelled"}})) == {"message": "cancelled"}
    assert error_in(stream({"response": {"error": {"code": "x"}}})) == {"code": "x"}
    assert error_in(stream({"response": {"error": None}})) is None
    assert error_in(Answer(200, {}, b'{"response": "text", "done": true}\n')) is None
    with pytest.raises(Refused):
        error_in(Answer(200, {}, b"""data: {"error": {"message": "'a' was unloaded before its load had ended"}}\n\n"""))


def test_what_is_not_given_back_is_found() -> None:
    at_rest = [("mlxpaged_kv_blocks", {"state": "cached"}, 3.0), ("mlxpaged_kv_blocks", {"state": "used"}, 0.0)]
    assert unbalanced(at_rest) == []
    assert len(unbalanced([*at_rest, ("mlxpaged_kv_blocks", {"state": "used"}, 1.0)])) == 1
    assert len(unbalanced([*at_rest, ("mlxpaged_requests_waiting", {}, 1.0)])) == 1


def test_errors_in_the_log_are_found() -> None:
    assert ERRORS.search("Traceback (most recent call last):")
    assert ERRORS.search("2026-01-01 ERROR mlxpaged.engine: a step failed")
    assert not ERRORS.search("2026-01-01 INFO mlxpaged.api: refused: status=404 reason=an error")


def test_a_slope_is_the_growth_for_each_unit() -> None:
    assert slope([(0, 10), (10, 30), (20, 50)]) == pytest.approx(2)


def test_one_large_step_is_no_slope_but_two_and_small_ones_are() -> None:
    assert without_step([(0, 10), (10, 11), (20, 51), (30, 52)], 30) == ([(0, 10), (10, 11), (20, 11), (30, 12)], 40)
    for figures in ([10, 50, 90, 130], [10, 30, 50, 70]):
        readings, _ = without_step(list(enumerate(figures)), 30)
        assert slope(readings) >= 10


async def with_server(pieces: Sequence[bytes], ask: Callable[[Connection], Awaitable[Answer]]) -> Answer:
    """What a client makes of an answer in these pieces; the server closes the connection after the last one."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.02)
            if not pieces:
                await left.wait()
        finally:
            writer.close()
            ended.set()

    left = asyncio.Event()
    ended = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = Connection(server.sockets[0].getsockname()[1])
        try:
            return await ask(connection)
        finally:
            connection.close()
            left.set()
            await asyncio.wait_for(ended.wait(), 60)


def answered_with(*pieces: bytes) -> Answer:
    async def ask(connection: Connection) -> Answer:
        return await Client(random.Random(0), connection, (), {}).ask("GET", "/")

    return asyncio.run(with_server(pieces, ask))


def test_the_client_reads_answers_whole_or_in_chunks_and_notices_one_that_ends_early() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    assert answered_with(head, b"blue").body == b"blue"
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert answered_with(chunks + b"2\r\nbl\r\n", b"2\r\nue\r\n0\r\n\r\n").body == b"blue"
    with pytest.raises(LeftError):
        answered_with(head, b"bl")
    with pytest.raises(Refused):
        answered_with(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(Wrong):
        answered_with(b"HTTP/1.1 500 Error\r\nContent-Length: 0\r\n\r\n")


class BusyWithBatches(Connection):
    """A server on which an earlier batch has a finished line more each time, up to `lines`."""

    def __init__(self, lines: int) -> None:
        super().__init__(0)
        self.lines, self.finished = lines, 0

    async def ask(self, method: str, path: str, *_: Any, **__: Any) -> Answer:
        made = {"id": "batch-1", "status": "in_progress", "request_counts": {"completed": 0, "failed": 0}}
        if path.startswith("/v1/batches?"):
            self.finished = min(self.lines, self.finished + 1)
            return found({"data": [made | {"request_counts": {"completed": self.finished, "failed": 0}}]})
        return found(made)


def test_a_batch_may_wait_for_those_before_it_as_long_as_they_make_progress(
    cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.jobs.BATCH_SECONDS", 0.0)
    connection = BusyWithBatches(lines=3)
    with pytest.raises(Wrong, match="no line was finished"):
        asyncio.run(batch(Client(random.Random(1), connection, [*cases.values()], {})))
    assert connection.finished == 3


def test_a_client_that_waits_in_vain_is_noticed() -> None:
    with pytest.raises(HungError):
        asyncio.run(with_server((), lambda connection: connection.ask("GET", "/", seconds=0.1)))
