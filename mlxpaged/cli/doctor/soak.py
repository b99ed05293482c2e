"""`mlxpaged doctor --soak`: the load under which macOS has panicked with other servers, over HTTP.

It is that of ml-explore/mlx#3186 (2026-07-07): prompts that no cache has, of up to 16,000 tokens, and long and short
answers, several at a time. There, two streams needed less than two minutes. Every two minutes all streams pause, so
that memory is wired and let go again (`--wired-memory on`).

On a Mac on which no server runs, the load runs twice: without wired memory, then with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from mlxpaged.cli.client import Client, Comment, ServerError
from mlxpaged.cli.connection import connected, found
from mlxpaged.durable_files import replacing

STREAMS = 4
PROMPTS = (12_000, 300, 16_000, 40, 4_000, 14_000)
ANSWERS = (16, 400, 64, 200)
SHORT = 16
"""Tokens of the prompts and answers of a stream, one after the other. Their numbers have no common pattern."""
VOCABULARY = 256
"""Prompts are of the first tokens, which every model has."""
SHOWN_SECONDS = 60.0
"""Time between two lines of progress."""
LOAD_SECONDS, REST_SECONDS = 120.0, 60.0
"""Times of load and of a pause, in turns. In a pause, the last answers end, and then nothing runs for as long as
memory needs to be wired (parts/memory/wired_memory.py)."""
AHEAD_SECONDS = 5.0
"""Time by which the first request after a pause is ahead of the others."""
AS_STARTED = "as the server was started"


@dataclass
class Soak:
    """ended: False in the file of --report if the machine has not survived the load. wired_memory: "off", "on" or
    AS_STARTED. first_seconds: of the first answer after each pause, until its first token: what wired memory is for."""

    model: str
    minutes: float
    wired_memory: str = AS_STARTED
    streams: int = STREAMS
    seconds: float = 0.0
    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    first_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ended: bool = False

    def __str__(self) -> str:
        done = f"{self.answers} answers, {self.prompt_tokens} tokens in, {self.answer_tokens} out"
        first = ""
        if self.first_seconds:
            first = f", first token after a pause in {statistics.median(self.first_seconds):.2f} s"
        wired = "" if self.wired_memory == AS_STARTED else f", wired memory {self.wired_memory}"
        return f"{self.seconds / 60:5.1f} minutes{wired}: {done}, {len(self.errors)} errors{first}"


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a request has failed or the server cannot be reached, else 0."""
    report = None if args.report in (None, "-") else Path(args.report)
    soaks: list[Soak] = []
    try:
        for wired in settings(is_running=found(args) is not None):
            more = [] if wired == AS_STARTED else ["--wired-memory", wired]
            with connected(args, args.model, more) as connection:
                name = Path(connection.model).name if Path(connection.model).exists() else connection.model
                soaks.append(Soak(name, args.soak, wired))
                Runner(connection.client, connection.model, soaks, report).run(quiet=args.json)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([asdict(each) for each in soaks], indent=1))
    return int(any(each.errors for each in soaks))


def settings(is_running: bool) -> tuple[str, ...]:
    """The settings of --wired-memory that are compared. is_running: whether a server runs, which has its own. Elsewhere
    than on a Mac, nothing is wired."""
    return (AS_STARTED,) if is_running or sys.platform != "darwin" else ("off", "on")


def until_load(since: float) -> float:
    """Seconds from a time, which began at the start of the load, until requests are sent; 0 if they are then."""
    within = since % (LOAD_SECONDS + REST_SECONDS)
    return 0.0 if within < LOAD_SECONDS else LOAD_SECONDS + REST_SECONDS - within


class Runner:
    """Sends the requests. Each stream sends the next one when it has its answer, and at least one. soaks: this one
    last, after those of other settings."""

    def __init__(self, client: Client, model: str, soaks: list[Soak], report: Path | None) -> None:
        self._client, self._model, self._soaks, self._report = client, model, soaks, report
        self._soak = soaks[-1]
        entries = client.get("/v1/models")["data"]
        longest = next((entry.get("max_model_len") for entry in entries if entry["id"] == model), None)
        if longest is None:  # only admins load models by hand
            raise ServerError(f"{model} is not loaded, and this key may not load it: send it a request first")
        self._longest = int(longest)
        self._lock = Lock()

    def run(self, quiet: bool) -> None:
        start = time.monotonic()
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(self.stream, index, start) for index in range(STREAMS)]
            while not self._soak.ended:
                self._soak.ended = not wait(streams, SHOWN_SECONDS).not_done
                self._soak.seconds = time.monotonic() - start
                self._save()
                if not quiet:
                    print(self._soak, flush=True)
            for stream in streams:
                stream.result()  # raises what no server can cause
        for error in dict.fromkeys(self._soak.errors):
            print(f"mlxpaged: {error}", file=sys.stderr)

    def stream(self, index: int, start: float) -> None:
        """One of the streams. start: of the load."""
        number, end = index, start + 60 * self._soak.minutes
        while True:
            self._ask(f"{index}, {number}", PROMPTS[number % len(PROMPTS)], ANSWERS[number % len(ANSWERS)])
            number += 1
            pause = until_load(time.monotonic() - start)
            if time.monotonic() + pause >= end:
                return
            if pause:
                time.sleep(pause if index == 0 else pause + AHEAD_SECONDS)
                if index == 0:
                    self._ask(f"first, {number}", SHORT, SHORT, is_first=True)

    def _ask(self, name: str, prompt_tokens: int, answer_tokens: int, is_first: bool = False) -> None:
        answer_tokens = min(answer_tokens, self._longest // 2)
        prompt_tokens = min(prompt_tokens, self._longest - answer_tokens)
        prompt = random.Random(name).choices(range(VOCABULARY), k=prompt_tokens)
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True}
        usage: dict[str, int] = {}
        error, first = None, 0.0
        started = time.monotonic()
        try:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with contextlib.closing(self._client.stream("/v1/completions", body)) as events:
                for event in events:
                    if not isinstance(event, Comment):
                        first = first or time.monotonic() - started
                        usage = event.get("usage") or usage
        except ServerError as failure:
            error = str(failure)
        if error is None and not usage:
            error = "a stream has ended early: the server has closed the connection"
        with self._lock:
            if error is not None:
                self._soak.errors.append(error)
                return
            if is_first:
                self._soak.first_seconds.append(round(first, 3))
            self._soak.answers += 1
            self._soak.prompt_tokens += usage["prompt_tokens"]
            self._soak.answer_tokens += usage["completion_tokens"]

    def _save(self) -> None:
        """Write the report to the disk: the next moment may be a panic."""
        if self._report is None:
            return
        with replacing(self._report) as file:
            file.write(f"{json.dumps([asdict(each) for each in self._soaks], indent=1)}\n".encode())
