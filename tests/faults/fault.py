"""What a fault is, and how it is injected again and again while the streams run."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.api.helpers import random_tokens
from tests.faults import wire
from tests.faults.patience import within
from tests.faults.server import FaultyServer
from tests.faults.streams import Streams, alone, chat, completion, headers_of
from tests.faults.table import LostError, Outcome, Row, judge
from tests.faults.wire import Answer, Reply

SHARE = float(os.environ.get("FAULTS_SHARE", "1"))
"""Of the times that each fault is injected, for a quick look."""

VICTIMS = [
    completion(random_tokens(12, 101), 8),
    completion(random_tokens(150, 102), 8),
    completion(random_tokens(40, 103), 8, temperature=1.0, seed=5),
    chat("Who are you?", 8),
    completion(random_tokens(12, 104), 8, structured_outputs={"regex": "[a-z]{30}"}),
]
"""What the clients with faults ask for, unless the fault is in the request itself."""

HELD = re.compile(r'mlxpaged_(requests_(running|waiting)\{|(kv|swap)_blocks\{.*state="used")')
"""What is 0 after the end of all requests."""

INTERNALS = re.compile(rb"Traceback|site-packages|\.py\b|\.rs\b|\b0x[0-9a-f]{6}")
"""What a refusal must not have: names of source files, and addresses in memory."""

Inject = Callable[["Context", int], Awaitable[Outcome]]


@dataclass(frozen=True)
class Fault:
    """inject: injects the fault once and judges what the client got. times: how often. parallel: how many at once.
    seconds: in which the client must get something. flags, open_files: of the server that it needs. refusals, is_cut:
    what it does to the streams, see `Streams`."""

    name: str
    inject: Inject
    times: int
    parallel: int = 8
    seconds: float = 30.0
    flags: tuple[str, ...] = ()
    open_files: int = 0
    refusals: Collection[int] = ()
    is_cut: bool = False

    @property
    def server(self) -> tuple[tuple[str, ...], int]:
        return self.flags, self.open_files


FAULTS: list[Fault] = []


def fault(name: str, times: int, **options: Any) -> Callable[[Inject], Inject]:
    """A row of the table: a function that injects one fault, given the number of the time."""

    def add(inject: Inject) -> Inject:
        FAULTS.append(Fault(name, inject, times, **options))
        return inject

    return add


class Context:
    """What a fault needs: the server, and clients."""

    def __init__(self, server: FaultyServer) -> None:
        self.server = server
        self.streams = Streams(server)
        self.expected: list[Answer] = []  # of VICTIMS
        self._numbers = itertools.count()

    async def begin(self) -> None:
        self.expected = [await alone(self.server, path, body, "victim") for path, body in VICTIMS]
        await self.streams.begin()

    def new_id(self) -> str:
        """Of a request. No id is the beginning of another one."""
        return f"victim-{next(self._numbers)}."

    async def end(self) -> None:
        """End the streams. Raises AssertionError if the server then keeps a request or a block for one."""
        await self.streams.end()
        for _ in range(100):
            held = [
                line
                for line in (await self.request("GET", "/metrics", key="admin")).body.decode().splitlines()
                if HELD.match(line) and not line.endswith(" 0.0")
            ]
            if not held:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"not given back: {held}")

    async def request(self, method: str, path: str, body: Any = None, key: str = "victim", **headers: str) -> Reply:
        """Raises LostError if a refusal tells what is inside the server."""
        fields = {"Authorization": f"Bearer {self.server.keys[key]}", **headers}
        reply = await wire.request(self.server.address, method, path, body, **fields)
        must(reply.status < 400 or INTERNALS.search(reply.body) is None, f"of the inside: {reply}")
        return reply

    async def post(self, path: str, body: Any, key: str = "victim", **headers: str) -> Reply:
        return await self.request("POST", path, body, key, **headers)

    async def upload(self, lines: str, key: str = "victim") -> Reply:
        """Upload the lines of a batch."""
        edge = "edge"
        form = (
            f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{lines}\r\n'
            f"--{edge}--\r\n"
        )
        return await self.post("/v1/files", form.encode(), key, Content_Type=f"multipart/form-data; boundary={edge}")

    def bytes_of(self, number: int, **fields: Any) -> bytes:
        """A victim's request as it is sent. fields: of its body."""
        path, body = VICTIMS[number % len(VICTIMS)]
        return wire.request_bytes("POST", path, body | fields, headers_of(self.server, "victim"))

    async def ask(self, number: int, statuses: Collection[int] = (200,), **headers: str) -> Outcome:
        """A victim's request and its answer, which must be right, or a refusal if another status is possible too."""
        path, body = VICTIMS[number % len(VICTIMS)]
        outcome = judge(path, await self.post(path, body, **headers), self.expected[number % len(VICTIMS)], statuses)
        if outcome is Outcome.REFUSED and set(statuses) == {200}:
            raise LostError("ended with an error")
        return outcome

    async def arm(self, place: str, **how: Any) -> None:
        await self.server.order(place=place, **{"times": 1, **how})

    async def disarm(self, place: str, prefix: str = "") -> None:
        await self.server.order(place=place, prefix=prefix)


def refused(path: str, reply: Reply, *statuses: int, code: str | None = None) -> Outcome:
    """Raises LostError unless the request was refused with one of these statuses, and this code."""
    outcome = judge(path, reply, None, statuses)
    if code is not None and reply.json["error"]["code"] != code:
        raise LostError(f"not {code}: {reply}")
    return outcome


def must(condition: object, problem: object) -> None:
    if not condition:
        raise LostError(str(problem))


async def inject_all(fault: Fault, context: Context, row: Row) -> None:
    """Inject a fault as often as it says, and fill its row."""
    started = time.monotonic()
    context.streams.note_in(row, fault.refusals, fault.is_cut)
    waiting = iter(range(max(1, round(fault.times * SHARE))))

    async def work() -> None:
        for number in waiting:
            problem = ""
            try:
                outcome = await within(fault.seconds, context.server.delay, fault.inject(context, number))
            except asyncio.TimeoutError:
                outcome, problem = Outcome.HUNG, f"nothing within {fault.seconds:.0f} s"
            except (LostError, OSError) as error:
                outcome, problem = Outcome.LOST, f"{type(error).__name__}: {error}"
            row.note(row.faulted, outcome, f"{number}: {problem}")

    await asyncio.gather(*(work() for _ in range(fault.parallel)))
    await context.streams.settle()
    row.seconds = time.monotonic() - started
