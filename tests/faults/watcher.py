"""Two clients of a server: `python -m tests.faults.watcher HOST PORT PID STREAM_KEY OTHER_KEY`.

They run in a process of their own, because what plays an attack has no time left to measure. The first client streams
long answers, one after the other. The second one asks for short answers. For each line on standard input, one line of
JSON says what both have seen since the last one: the largest gap between two tokens of a stream and the longest wait
for a first token of the second client, how many answers were right, and what was wrong. Both are given twice:

- gap, first: in seconds, without those in which a thread of the server or of this process had work but no core.
- gap_work, first_work: each wait counts as the processor time that the server and its children used in it, if that is
  less. What the server does instead of answering takes processor time, and other programs take none of the server's.
  On a busy machine, one thread waits for a core after the other, and the first measure finds only the longest wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.faults.patience import processor_seconds, thread_delays
from tests.faults.wire import Address, Answer, answer_of, read_reply, request_bytes

PATH = "/v1/completions"


def body_of(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    fields = {"model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True}
    return fields | {"prompt": prompt, "max_tokens": num_tokens}


STREAM = body_of([20 + 7 * i % 400 for i in range(20)], 120)
SHORT = body_of([20 + 11 * i % 400 for i in range(12)], 2)


@dataclass(frozen=True)
class Moment:
    """seconds: of the clock. delays: of the threads of the server, and of this process, up to then. work: processor
    seconds of the server and its children."""

    seconds: float
    delays: list[dict[str, float]]
    work: float

    @classmethod
    def now(cls, pid: int) -> Moment:
        """pid: of the server."""
        delays = [thread_delays(each) for each in (pid, os.getpid())]
        return cls(time.monotonic(), delays, processor_seconds(pid))

    def since(self, then: Moment) -> float:
        """Seconds from then to now, without those for which a thread waited for a core."""
        seconds = self.seconds - then.seconds
        for before, after in zip(then.delays, self.delays, strict=True):
            seconds -= max((delay - before.get(thread, 0.0) for thread, delay in after.items()), default=0.0)
        return max(0.0, seconds)


class Client:
    """Asks the same question again and again. The first answer is the known one."""

    def __init__(self, address: Address, pid: int, key: str, body: dict[str, Any]) -> None:
        self._address = address
        self._pid = pid
        self._data = request_bytes("POST", PATH, body, {"Authorization": f"Bearer {key}"})
        self._known: Answer | None = None
        self._waits_since: Moment | None = None
        self._has_first = False
        self.first = self.gap = self.first_work = self.gap_work = 0.0
        self.num_right = 0
        self.problems: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                await self.ask()
            except Exception as error:
                self.problems.append(repr(error))
                await asyncio.sleep(0.1)

    async def ask(self) -> None:
        self._waits_since, self._has_first = Moment.now(self._pid), False
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(self._data)
            received = b""
            while piece := await reader.read(65536):
                received += piece
                if b"data: {" in piece:
                    self._waits_since, self._has_first = self.note_wait(), True
        finally:
            self._waits_since = None
            writer.close()
        answer = answer_of(PATH, read_reply(received))
        self._known = self._known or answer
        if answer == self._known and answer.ended == ("length",):
            self.num_right += 1
        else:
            self.problems.append(f"{answer}, not {self._known}: {received[-300:]!r}")

    def note_wait(self) -> Moment:
        """Note the wait up to now, whether it ends now or not."""
        now = Moment.now(self._pid)
        if self._waits_since is not None:
            seconds = now.since(self._waits_since)
            work = min(seconds, now.work - self._waits_since.work)
            if self._has_first:
                self.gap, self.gap_work = max(self.gap, seconds), max(self.gap_work, work)
            else:
                self.first, self.first_work = max(self.first, seconds), max(self.first_work, work)
        return now

    def take(self) -> dict[str, Any]:
        """What was seen since the last call."""
        self.note_wait()
        found: dict[str, Any] = {"first": self.first, "first_work": self.first_work, "gap": self.gap}
        found |= {"gap_work": self.gap_work, "right": self.num_right, "problems": self.problems[:3]}
        self.first = self.gap = self.first_work = self.gap_work = 0.0
        self.num_right, self.problems = 0, []
        return found


async def main(host: str, port: str, pid: str, *keys: str) -> None:
    address = host, int(port)
    clients = [Client(address, int(pid), key, body) for key, body in zip(keys, (STREAM, SHORT), strict=True)]
    for client in clients:  # one after the other: their known answers
        await client.ask()
    running = [asyncio.create_task(client.run()) for client in clients]
    while await asyncio.to_thread(sys.stdin.readline):
        stream, short = (client.take() for client in clients)
        problems = stream["problems"] + short["problems"]
        found = {"gap": stream["gap"], "gap_work": stream["gap_work"], "problems": problems}
        found |= {"first": short["first"], "first_work": short["first_work"], "right": stream["right"] + short["right"]}
        print(json.dumps(found), flush=True)
    for task in running:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
