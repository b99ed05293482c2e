"""How soon hostile images are refused over HTTP, and what that does to streams.

    python -m tests.vision.hostile_figures [--streams 8] [--repeats 20] [--seconds 10]

A server in a process of its own serves the vision demo. Requests with the files are sent one at a time on a connection
that is open, first to an idle server and then beside streams, each file by turns. A time begins when the request is
sent and ends with its answer; the client takes its share of the machine's cores. The processor's time is that of the
server's process, while it is idle otherwise. An answer of a stream is right if it is the one that it has alone.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from PIL import Image

from tests.cli.helpers import serving
from tests.vision.files import HOSTILE, black_png, url_of

CHAT = "/v1/chat/completions"
REST_SECONDS = 0.05
"""Between two requests: the server rests after a large one."""
TOKENS = 60
"""Tokens of a stream's answer, after which it asks again."""


def photo(width: int, height: int) -> bytes:
    """A JPEG of clouds of colour."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def requests() -> dict[str, list[dict[str, Any]]]:
    """The parts of a message, by what is wrong with them."""

    def shown(url: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    names = ("30,000 x 30,000 pixels", "half a JPEG", "SVG", "PostScript")
    found = {name: [shown(url_of(HOSTILE[name][0]))] for name in names}
    found["a photo of 41 MP"] = [shown(url_of(photo(8200, 5000)))]
    found["200 images"] = [shown(url_of(black_png(64, 64)))] * 200
    found["a number for a URL"] = [shown(7)]
    found["a list for an image"] = [{"type": "image_url", "image_url": [url_of(b"")]}]
    found["wrong base64"] = [shown("data:image/png;base64,aGk=aGk=")]
    return found


def body_of(*parts: dict[str, Any], **fields: Any) -> bytes:
    content = [{"type": "text", "text": "What number is in the picture?"}, *parts]
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


class Streams:
    """gaps: seconds between two tokens of a stream, alone and beside images. answers: all that have ended. The
    first one ends before the images come."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.gaps: tuple[list[float], list[float]] = ([], [])
        self.answers: list[str] = []
        self.beside = False

    async def run(self) -> None:
        body = body_of(max_tokens=TOKENS, ignore_eos=True, temperature=0, stream=True)
        while True:
            last, text = 0.0, ""
            async with self._client.stream("POST", CHAT, content=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last:
                        self.gaps[self.beside].append(now - last)
                    last, text = now, text + (json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            self.answers.append(text)

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.run()) for _ in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for failure in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(failure, asyncio.CancelledError):
                    raise SystemExit(f"a stream has failed: {failure!r}")


@dataclass
class Refusal:
    """seconds: of each request to an idle server, and of each beside streams. processor: seconds of an idle server for
    all of the first."""

    body: bytes
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    processor: float = 0.0
    reason: str = ""

    async def send(self, client: httpx.AsyncClient, beside: bool) -> None:
        start = time.perf_counter()
        response = await client.post(CHAT, content=self.body)
        self.seconds[beside].append(time.perf_counter() - start)
        if response.status_code != 400:
            raise SystemExit(f"not refused: status {response.status_code}, {response.text}")
        self.reason = response.json()["error"]["message"].partition(": ")[2]

    @property
    def figures(self) -> list[float]:
        """Seconds: the processor's for a request, the median of an idle server, that beside streams."""
        alone, beside = self.seconds
        return [self.processor / len(alone), float(np.median(alone)), float(np.median(beside))]


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(url: str, process: psutil.Process, num_streams: int, repeats: int, seconds: float) -> None:
    refusals = {name: Refusal(body_of(*parts, max_tokens=1)) for name, parts in requests().items()}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
        for each in refusals.values():
            await Refusal(each.body).send(client, beside=False)  # the first one may load a decoder
            before = processor_seconds(process)
            for _ in range(repeats):
                await each.send(client, beside=False)
                await asyncio.sleep(REST_SECONDS)
            each.processor = processor_seconds(process) - before
        streams = Streams(client)
        async with streams.running(num_streams):
            await asyncio.sleep(seconds)
            while not streams.answers:
                await asyncio.sleep(REST_SECONDS)
            streams.beside = True
            for _ in range(repeats):
                for each in refusals.values():
                    await each.send(client, beside=True)
                    await asyncio.sleep(REST_SECONDS)
    print("| File | kB of the request | Processor, ms | Idle server, ms | Beside streams, ms | Reason |")
    print("|---|---|---|---|---|---|")
    for name, each in refusals.items():
        figures = " | ".join(f"{1000 * figure:.1f}" for figure in each.figures)
        print(f"| {name} | {len(each.body) / 1000:.1f} | {figures} | {each.reason} |")
    print(f"\n{'inter-token ms':24} {'p50':>8} {'p99':>8} {'largest':>8}")
    for label, gaps in zip(("alone", "beside the files"), streams.gaps, strict=True):
        figures = [*np.percentile(gaps, [50, 99]), max(gaps)]
        print(f"{label:24}" + "".join(f" {1000 * figure:8.1f}" for figure in figures))
    right = streams.answers.count(streams.answers[0])
    print(f"{right} of {len(streams.answers)} answers of {num_streams} streams are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20, help="of each file")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the streams run alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, serving(Path(directory), "demo-vision", fork=False) as command:
        process = psutil.Process(command.process.pid)
        asyncio.run(measure(command.url, process, args.streams, args.repeats, args.seconds))


if __name__ == "__main__":
    main()
