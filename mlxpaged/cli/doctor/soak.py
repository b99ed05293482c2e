"""`mlxpaged doctor --soak`: the load under which macOS has panicked with other servers, over HTTP.

It is that of ml-explore/mlx#3186 (2026-07-07): prompts that no cache has, of up to 16,000 tokens, and long and short
answers, several at a time. There, two streams needed less than two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock

from mlxpaged.cli.client import Client, Comment, ServerError
from mlxpaged.cli.connection import connected

STREAMS = 4
PROMPTS = (12_000, 300, 16_000, 40, 4_000, 14_000)
ANSWERS = (16, 400, 64, 200)
"""Tokens of the prompts and answers of a stream, one after the other. Their numbers have no common pattern."""
VOCABULARY = 256
"""Prompts are of the first tokens, which every model has."""
SHOWN_SECONDS = 60.0
"""Time between two lines of progress."""


@dataclass
class Soak:
    """ended: False in the file of --report if the machine has not survived the load."""

    model: str
    minutes: float
    streams: int = STREAMS
    seconds: float = 0.0
    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    ended: bool = False

    def __str__(self) -> str:
        done = f"{self.answers} answers, {self.prompt_tokens} tokens in, {self.answer_tokens} out"
        return f"{self.seconds / 60:5.1f} minutes: {done}, {len(self.errors)} errors"


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a request has failed or the server cannot be reached, else 0."""
    report = None if args.report in (None, "-") else Path(args.report)
    try:
        with connected(args, args.model) as connection:
            name = Path(connection.model).name if Path(connection.model).exists() else connection.model
            runner = Runner(connection.client, connection.model, Soak(name, args.soak), report)
            found = runner.run(quiet=args.json)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(asdict(found), indent=1))
    return int(bool(found.errors))


class Runner:
    """Sends the requests. Each stream sends the next one when it has its answer, and at least one."""

    def __init__(self, client: Client, model: str, soak: Soak, report: Path | None) -> None:
        self._client, self._model, self._soak, self._report = client, model, soak, report
        entries = client.get("/v1/models")["data"]
        longest = next((entry.get("max_model_len") for entry in entries if entry["id"] == model), None)
        if longest is None:  # only admins load models by hand
            raise ServerError(f"{model} is not loaded, and this key may not load it: send it a request first")
        self._longest = int(longest)
        self._lock = Lock()

    def run(self, quiet: bool) -> Soak:
        start = time.monotonic()
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(self._stream, index, start + 60 * self._soak.minutes) for index in range(STREAMS)]
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
        return self._soak

    def _stream(self, index: int, end: float) -> None:
        number = index
        while True:
            self._ask(f"{index}, {number}", PROMPTS[number % len(PROMPTS)], ANSWERS[number % len(ANSWERS)])
            number += 1
            if time.monotonic() >= end:
                return

    def _ask(self, name: str, prompt_tokens: int, answer_tokens: int) -> None:
        answer_tokens = min(answer_tokens, self._longest // 2)
        prompt_tokens = min(prompt_tokens, self._longest - answer_tokens)
        prompt = random.Random(name).choices(range(VOCABULARY), k=prompt_tokens)
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True}
        usage: dict[str, int] = {}
        error = None
        try:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with contextlib.closing(self._client.stream("/v1/completions", body)) as events:
                for event in events:
                    if not isinstance(event, Comment):
                        usage = event.get("usage") or usage
        except ServerError as failure:
            error = str(failure)
        if error is None and not usage:
            error = "a stream has ended early: the server has closed the connection"
        with self._lock:
            if error is not None:
                self._soak.errors.append(error)
                return
            self._soak.answers += 1
            self._soak.prompt_tokens += usage["prompt_tokens"]
            self._soak.answer_tokens += usage["completion_tokens"]

    def _save(self) -> None:
        """Write the report to the disk: the next moment may be a panic."""
        if self._report is None:
            return
        with self._report.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self._soak), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
