"""The load of overload.py, a process of its own: idle connections, bodies that come slowly, and a flood of prompts.

Prints a line of JSON at its end, when standard input is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter

import uvloop

BYTE_SECONDS = 1.0
"""A slow body gets another byte after this time."""
RETRY_SECONDS = 0.05
"""After a refusal, a client of the flood waits this long."""
AT_ONCE = 100
"""Connections that are opened at the same time: the system lets a listener have only so many that wait."""
BODY = json.dumps({"model": "x", "messages": [{"role": "user", "content": "x" * 4000}]}).encode()

Address = tuple[str, int]


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


async def idle(address: Address, count: int, opened: Counter[str]) -> None:
    """Keep so many connections open that have each asked for nothing. The server closes them after half a minute."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        while True:
            async with turn:
                reader, writer = await asyncio.open_connection(*address)
            opened["idle connections"] += 1
            await reader.read()
            writer.close()

    await asyncio.gather(*(repeated(one) for _ in range(count)))


async def slow_bodies(address: Address, count: int, opened: Counter[str]) -> None:
    async def one() -> None:
        while True:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head("/v1/chat/completions", len(BODY)))
            opened["slow bodies"] += 1
            for byte in BODY:
                writer.write(bytes((byte,)))
                await asyncio.sleep(BYTE_SECONDS)
                if reader.at_eof() or writer.is_closing():
                    break
            writer.close()

    await asyncio.gather(*(repeated(one) for _ in range(count)))


async def flood(address: Address, count: int, chars: int, opened: Counter[str]) -> None:
    """So many clients send one large prompt after the other. Each prompt is new, so that no cache has it."""
    source = random.Random(1)

    async def one() -> None:
        while True:
            words = " ".join(str(source.randrange(10**6)) for _ in range(chars // 7))
            body = json.dumps({"messages": [{"role": "user", "content": words}], "max_tokens": 1}).encode()
            reader, writer = await asyncio.open_connection(*address)
            writer.write(head("/v1/chat/completions", len(body)) + body)
            status = (await reader.readline())[9:12].decode()
            opened[f"prompts with status {status}"] += 1
            writer.close()
            if status != "200":
                await asyncio.sleep(RETRY_SECONDS)

    await asyncio.gather(*(repeated(one) for _ in range(count)))


async def repeated(one: object) -> None:
    """A client whose connection is reset begins anew."""
    while True:
        with contextlib.suppress(OSError):
            await one()  # type: ignore[operator]
        await asyncio.sleep(RETRY_SECONDS)


async def main(port: int, connections: int, bodies: int, prompts: int, chars: int) -> None:
    address, opened = ("127.0.0.1", port), Counter[str]()
    tasks = [
        asyncio.ensure_future(load)
        for load in (
            idle(address, connections, opened),
            slow_bodies(address, bodies, opened),
            flood(address, prompts, chars, opened),
        )
    ]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(json.dumps(opened), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*map(int, sys.argv[1:])))
