"""Sixteen clients that ask without a pause, and compare each answer with the one that was computed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from tests.api.helpers import random_tokens
from tests.faults import wire
from tests.faults.patience import within
from tests.faults.server import FaultyServer
from tests.faults.table import LostError, Outcome, Row, judge
from tests.faults.wire import Answer, answer_of

ANSWER_SECONDS = 60.0
"""An answer that is not complete after this time hangs. Most take less than one second."""

CHAT, COMPLETIONS, MESSAGES, RESPONSES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc", "def"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9999}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
PREFIX = random_tokens(96, 1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def completion(prompt: Any, num_tokens: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, {**body, "stream": True, **fields}


def chat(text: str, num_tokens: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": user(text), "max_tokens": num_tokens, "temperature": 0, "stream": True}
    return CHAT, {**body, **fields}


BODIES: list[tuple[str, dict[str, Any]]] = [
    completion(random_tokens(20, 2), 24),
    completion(PREFIX + random_tokens(9, 3), 24),
    completion(PREFIX + random_tokens(40, 4), 40),
    completion(random_tokens(300, 5), 12),
    completion(random_tokens(33, 6), 32, temperature=0.9, seed=7),
    completion(PREFIX + random_tokens(5, 8), 24, temperature=1.1, top_p=0.9, seed=9, n=2),
    completion(random_tokens(64, 10), 24, repetition_penalty=1.3, frequency_penalty=0.5),
    completion(random_tokens(15, 11), 48, stream=False),
    chat("What is 17 + 25?", 24),
    chat("Tell a story.", 40, temperature=0.8, seed=3, top_k=40),
    chat("Name one.", 40, response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}),
    chat("Stop early.", 40, stop=["e", "zzz"], ignore_eos=True),
    chat("Not streamed.", 24, stream=False, logprobs=True, top_logprobs=2),
    (MESSAGES, {"model": "tiny", "messages": user("Hello"), "max_tokens": 24, "temperature": 0, "stream": True}),
    (RESPONSES, {"model": "tiny", "input": "Hello", "max_output_tokens": 24, "temperature": 0, "stream": True}),
    (OLLAMA, {"model": "tiny", "messages": user("Hello"), "options": {"num_predict": 24, "temperature": 0}}),
]


def headers_of(server: FaultyServer, key: str, request_id: str | None = None) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {server.keys[key]}"}
    return headers if request_id is None else headers | {"X-Request-Id": request_id}


async def alone(server: FaultyServer, path: str, body: Any, key: str) -> Answer:
    """The answer, while the server does nothing else."""
    reply = await wire.exchange(server.address, wire.request_bytes("POST", path, body, headers_of(server, key)))
    assert judge(path, reply, None) is Outcome.RIGHT
    answer = answer_of(path, reply)
    assert answer.ended, reply
    assert answer.error is None, reply
    return answer


class Streams:
    """They run while the event loop runs, until `end`. Each answer is noted in the row of the fault that is injected.

    refusals: statuses that an answer may have now, beside 200; an answer that has begun may then end with an error
    event. is_cut: whether connections may end, because the process does.
    """

    def __init__(self, server: FaultyServer) -> None:
        self._server = server
        self._expected: list[Answer] = []
        self._row = Row("none")
        self._refusals: Collection[int] = ()
        self._is_cut = False
        self._ended = [0] * len(BODIES)
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        self._expected = [await alone(self._server, path, body, "streams") for path, body in BODIES]
        self._tasks = [asyncio.ensure_future(self._ask(i)) for i in range(len(BODIES))]

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def note_in(self, row: Row, refusals: Collection[int] = (), is_cut: bool = False) -> None:
        """From now on."""
        self._row, self._refusals, self._is_cut = row, refusals, is_cut

    async def settle(self) -> None:
        """Until the answers that are in flight have ended, or count as hanging."""
        before = list(self._ended)
        while self._tasks and any(now == then for now, then in zip(self._ended, before, strict=True)):
            assert not any(task.done() for task in self._tasks), "a stream has ended"
            await asyncio.sleep(0.02)

    async def _ask(self, number: int) -> None:
        path, body = BODIES[number]
        while True:
            data = wire.request_bytes("POST", path, body, headers_of(self._server, "streams"))
            problem = ""
            try:
                reply = await within(ANSWER_SECONDS, self._server.delay, wire.exchange(self._server.address, data))
                outcome, problem = self._judge(path, reply, self._expected[number])
            except asyncio.TimeoutError:
                outcome, problem = Outcome.HUNG, "no end"
            except OSError as error:
                outcome, problem = (Outcome.CUT, "") if self._is_cut else (Outcome.LOST, repr(error))
            except Exception as error:  # the answer cannot be read; the stream goes on
                outcome, problem = Outcome.LOST, repr(error)
            self._row.note(self._row.streams, outcome, f"stream {number}: {problem}")
            self._ended[number] += 1
            if outcome is not Outcome.RIGHT:
                await asyncio.sleep(0.5)

    def _judge(self, path: str, reply: wire.Reply, expected: Answer) -> tuple[Outcome, str]:
        if self._is_cut and not reply.whole:
            return Outcome.CUT, ""
        try:
            outcome = judge(path, reply, expected, {200, *self._refusals})
            if outcome is Outcome.REFUSED and not self._refusals:
                return Outcome.LOST, f"refused: {reply}"
            return outcome, ""
        except LostError as error:
            return Outcome.LOST, str(error)
