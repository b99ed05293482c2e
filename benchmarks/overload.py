"""What too many clients do to /health and to the streams that run.

    python benchmarks/overload.py [MODEL] [--connections 2000] [--bodies 500] [--prompts 32] [-- FLAGS OF serve]

A server in a process of its own answers so many streams. /health is asked every 50 ms, each time on a new connection.
Then another process opens idle connections, sends bodies a byte at a time, and floods the server with large prompts.
It has the lowest priority, because clients on other machines would take no time from the server.
Measured are the time of /health, connection included, and the time between two tokens of a stream, before the load,
under it, and after it; and how many tokens a second the slowest stream has.

The figures to quote are the times of /health under the load, and the ratios of the inter-token times. A step takes
longer as the answers grow, so a ratio is that to the mean of the figures before and after the load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import uvloop

CLIENTS = Path(__file__).with_name("overload_clients.py")
LABELS = {"health": "/health", "tokens": "inter-token"}
HEALTH_SECONDS = 0.05
START_SECONDS = 300.0
SETTLE_SECONDS = 3.0
"""Not measured, at the start and after the load."""


class Measurement:
    """Seconds of each request for /health, and between two tokens of a stream; tokens of each stream."""

    def __init__(self) -> None:
        self.health: list[float] = []
        self.tokens: list[float] = []
        self.by_stream: Counter[int] = Counter()

    def lines(self, name: str, others: Sequence[Measurement] = ()) -> list[str]:
        """others: those that the ratios are to."""
        lines = []
        for what in ("health", "tokens"):
            seconds = getattr(self, what)
            figures = figures_of(seconds)
            text = "".join(f"{1000 * figure:10.1f}" for figure in figures)
            if others:
                usual = np.mean([figures_of(getattr(each, what)) for each in others], axis=0)
                with np.errstate(invalid="ignore"):  # tokens that come together have no time between them
                    text += "".join(f"{figure:8.1f}" for figure in figures / usual)
            lines.append(f"{name:14}{LABELS[what]:12}{len(seconds):7}{text}")
        return lines


def figures_of(seconds: list[float]) -> list[float]:
    """Mean, p50, p99 and the largest."""
    return [float(np.mean(seconds)), *np.percentile(seconds, [50, 99]).tolist(), max(seconds)]


async def measure_health(port: int, into: list[Measurement]) -> None:
    """into: the last one gets the figures."""
    while True:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        seconds = time.perf_counter() - started
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"/health answered {answer!r}")
        into[-1].health.append(seconds)
        await asyncio.sleep(max(0.0, HEALTH_SECONDS - seconds))


async def measure_stream(port: int, number: int, tokens: int, into: list[Measurement]) -> None:
    """Ask for one long answer after the other."""
    fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    messages = [{"role": "user", "content": f"Stream {number}"}]
    body = json.dumps({"messages": messages, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        last, received = None, b""
        while b"[DONE]" not in received:
            received = received[-6:] + (piece := await reader.read(65536))
            if not piece or b'"error"' in piece:
                raise RuntimeError(f"a stream ended: {piece!r}")
            now, events = time.perf_counter(), piece.count(b"data:")
            if last is not None and events:
                into[-1].tokens += [now - last, *(events - 1) * [0.0]]
                into[-1].by_stream[number] += events
            last = now if events else last
        writer.close()


@contextlib.asynccontextmanager
async def running(args: argparse.Namespace) -> AsyncIterator[int]:
    """A server. Yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "mlxpaged", "serve", args.model, "--port", str(port), "--log-level", "error"]
    command += args.flags
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + START_SECONDS
            while not await is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server does not start")
                await asyncio.sleep(0.2)
            yield port
        finally:
            process.kill()


async def is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
    except OSError:
        return False
    return answer.startswith(b"HTTP/1.1 200 ")


async def phase(tasks: list[asyncio.Task[None]], seconds: float) -> None:
    """Measure for so long. Raises what a task has raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def measure(args: argparse.Namespace) -> None:
    async with running(args) as port:
        measured = [Measurement()]
        tasks = [asyncio.ensure_future(measure_health(port, measured))]
        tasks += [asyncio.ensure_future(measure_stream(port, i, args.tokens, measured)) for i in range(args.streams)]
        await phase(tasks, SETTLE_SECONDS)
        measured.append(before := Measurement())
        await phase(tasks, args.seconds)
        measured.append(overload := Measurement())
        numbers = [str(n) for n in (port, args.connections, args.bodies, args.prompts, args.chars)]
        command = ["nice", "-n", "19", sys.executable, str(CLIENTS), *numbers]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as load:
            await phase(tasks, args.seconds)
            counts, _ = await asyncio.to_thread(load.communicate)
        measured.append(Measurement())
        await phase(tasks, SETTLE_SECONDS)
        measured.append(after := Measurement())
        await phase(tasks, args.seconds)
        for task in tasks:
            task.cancel()
    print(f"{'':14}{'':12}{'':7}{'ms':>40}{'ratio':>32}")
    print(f"{'':14}{'':12}{'times':>7}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p99", "max")), end="")
    print("".join(f"{name:>8}" for name in ("mean", "p50", "p99", "max")))
    usual = (before, after)
    for name, measurement, others in (("before", before, ()), ("overload", overload, usual), ("after", after, ())):
        print("\n".join(measurement.lines(name, others)))
    slowest = [min(each.by_stream.values()) / args.seconds for each in (before, overload, after)]
    print("slowest stream, tokens a second: " + ", ".join(f"{pace:.1f}" for pace in slowest))
    print("load: " + ", ".join(f"{count} {what}" for what, count in json.loads(counts).items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [MODEL] [-- FLAGS OF serve]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3000, help="of each stream's answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--connections", type=int, default=2000, help="idle ones")
    parser.add_argument("--bodies", type=int, default=500, help="that come a byte at a time")
    parser.add_argument("--prompts", type=int, default=32, help="clients that send large prompts")
    parser.add_argument("--chars", type=int, default=4000, help="of a large prompt")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)  # argparse loses flags after options
    args = parser.parse_args(sys.argv[1:end])
    args.flags = sys.argv[end + 1 :]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(measure(args))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
