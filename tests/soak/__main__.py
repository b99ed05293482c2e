"""A server under mixed load on a tiny pool: `make soak MINUTES=60`.

Every answer that can be known is compared with the one computed alone. The exit status is 1 if an answer was wrong, a
client got no answer, the log has an error, something was not given back at the end, or memory grew too much in the
second half.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mlxpaged.api.image_threads import IMAGES
from mlxpaged.api.server import BODIES, FILES, HUGE_BODIES
from mlxpaged.models.text.templates import renderer
from mlxpaged.parts.grammar.check import checker
from mlxpaged.vision.decoding import decoder
from tests.soak.cases import Case, make_cases
from tests.soak.http_client import Connection, HungError, LeftError
from tests.soak.jobs import JOBS, Client, Refused, Wrong, streaming
from tests.soak.models import make_models
from tests.soak.server_process import ServerProcess, Usage, server_process
from tests.soak.slopes import slope

GENERATE = ("small", "small:adapted", "hybrid", "other")
SEEING = "seeing"
ALWAYS_LOADED = ("small", "hybrid")
STEPS = "mlxpaged_engine_steps_total"
SHORTAGES = {
    "mlxpaged_preemptions_total": "preemptions",
    "mlxpaged_kv_blocks_swapped_out_total": "blocks swapped out",
    "mlxpaged_kv_blocks_swapped_in_total": "blocks swapped in",
}
"""Metrics that show that the pool is too small for the load."""
NUM_CLIENTS = 14
NUM_CASES = 6
READ_SECONDS = 5.0
MOST_SHOWN = 30
"""Faults. One mistake can be noticed thousands of times."""
RULES = (BODIES, HUGE_BODIES, FILES, IMAGES)
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4) + sum(rules.at_once for rules in RULES) + 2
"""More than before the load, which stay once they are started: those of asyncio, of large bodies, files and images, one
for large answers, and one for batches."""
PIPES = 2 * (renderer.MAX_IDLE - 1 + decoder.MAX_IDLE + checker.MAX_IDLE)
"""Of processes that render chat templates, decode images and check grammars, more than before the load, when there was
one."""
MOST_GROWTH = 5e6
"""Bytes that resident memory may grow by in the second half."""
FLAGS = (
    *("--max-model-len", "384", "--max-num-seqs", "8", "--block-size", "8", "--kv-cache-memory", "200KB"),
    *("--swap-space", "100KB", "--state-cache-memory", "200KB", "--max-queue", "24", "--timelines"),
)
ERRORS = re.compile(r"Traceback|\b(?:ERROR|CRITICAL)\b|Exception|MemoryError")


@dataclass
class Reading:
    """At a time of the run. steps: of the models that are always loaded, together."""

    seconds: float
    usage: Usage
    steps: float
    jobs: int


@dataclass
class Soak:
    server: ServerProcess
    seed: int
    cases: list[Case]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    shortages: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float) -> None:
        connection = Connection(self.server.port)
        expected = {}
        for case in self.cases:
            answer = await connection.ask("POST", case.path, case.body | streaming(case, False))
            assert answer.status == 200, f"{case.name}: {answer.body!r}"
            expected[case.name] = case.read(answer)
        connection.close()
        base, end = self.server.usage(), time.monotonic() + seconds
        print(
            f"{len(expected)} answers computed alone; {seconds / 60:g} minutes with {NUM_CLIENTS} clients", flush=True
        )
        clients = [self._client(index, expected, end) for index in range(NUM_CLIENTS)]
        await asyncio.gather(self._read(end), *clients)
        await self._check_balance(base)

    async def _client(self, index: int, expected: dict[str, Any], end: float) -> None:
        rng = random.Random(f"{self.seed} {index}")
        client = Client(rng, Connection(self.server.port), self.cases, expected)
        while time.monotonic() < end:
            (job,) = rng.choices([*JOBS], [*JOBS.values()])
            try:
                await job(client)
                outcome = "right"
            except Refused:
                outcome = "refused"
                await asyncio.sleep(0.05)
            except (Wrong, HungError, LeftError, OSError) as error:
                outcome = "wrong" if isinstance(error, Wrong) else "hung" if isinstance(error, HungError) else "lost"
                self._note(f"{job.__name__}: {error or type(error).__name__}")
                client.connection.close()
            except Exception:
                outcome = "wrong"
                self._note(f"{job.__name__}: {traceback.format_exc()}")
                client.connection.close()
            self.counts[job.__name__, outcome] += 1
        client.connection.close()

    def _note(self, fault: str) -> None:
        self.faults.append(fault)
        if len(self.faults) <= MOST_SHOWN:
            print(f"FAULT {fault[:1000]}", flush=True)

    async def _read(self, end: float) -> None:
        """Reads what the process has every few seconds, and prints a line every minute."""
        connection, began, printed = Connection(self.server.port), time.monotonic(), time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(READ_SECONDS)
            steps = {labels["model"]: value for name, labels, value in await metrics(connection) if name == STEPS}
            now = time.monotonic()
            self.readings.append(
                Reading(
                    now - began,
                    self.server.usage(),
                    sum(map(steps.__getitem__, ALWAYS_LOADED)),
                    sum(self.counts.values()),
                )
            )
            if now - printed >= 60:
                printed = now
                print(line_of(self.readings[-1]), flush=True)
        connection.close()

    async def _check_balance(self, base: Usage) -> None:
        """When all requests have ended, everything is given back."""
        connection = Connection(self.server.port)
        for name, _, value in await metrics(connection):
            if name in SHORTAGES:
                self.shortages[SHORTAGES[name]] += int(value)
        if not all(self.shortages[each] for each in SHORTAGES.values()):
            self._note(f"the pool was large enough: {dict(self.shortages)}")
        for _ in range(100):
            missing = unbalanced(await metrics(connection))
            usage = self.server.usage()
            if usage.descriptors > base.descriptors + 1 + PIPES:  # 1: this connection
                missing.append(f"{usage.descriptors} descriptors, {base.descriptors} before")
            if usage.threads > base.threads + POOL_THREADS:
                missing.append(f"{usage.threads} threads, {base.threads} before")
            if not missing:
                break
            await asyncio.sleep(0.2)
        connection.close()
        for fault in missing:
            self._note(f"at the end: {fault}")

    def check_log(self) -> None:
        lines = self.server.log.read_text(errors="replace").splitlines()
        for found in [line for line in lines if ERRORS.search(line)][:20]:
            self._note(f"log: {found[:500]}")

    def check_growth(self) -> None:
        """Prints the slopes."""
        half = [each for each in self.readings if each.seconds >= self.readings[-1].seconds / 2]
        minutes = (half[-1].seconds - half[0].seconds) / 60
        rates = [
            (later.seconds, (later.seconds - earlier.seconds) / max(1.0, later.steps - earlier.steps) * 1000)
            for earlier, later in itertools.pairwise(half)
        ]
        figures: dict[str, list[tuple[float, float]]] = {
            "resident memory, MB": [(each.seconds, each.usage.resident / 1e6) for each in half],
            "private memory, MB": [(each.seconds, each.usage.private / 1e6) for each in half],
            "descriptors": [(each.seconds, each.usage.descriptors) for each in half],
            "threads": [(each.seconds, each.usage.threads) for each in half],
            "a step of theirs, ms": rates,
        }
        print(f"\n{'second half':<24}{'first':>10}{'last':>10}{'an hour':>10}")
        for name, values in figures.items():
            print(f"{name:<24}{values[0][1]:>10.1f}{values[-1][1]:>10.1f}{slope(values) * 3600:>10.2f}")
        growth = slope([(each.seconds, each.usage.resident) for each in half]) * minutes * 60
        if growth > MOST_GROWTH:
            self._note(f"resident memory grew by {growth / 1e6:.1f} MB in {minutes:.1f} minutes")

    def print_counts(self) -> None:
        outcomes = ("right", "refused", "wrong", "hung", "lost")
        print(f"\n{'job':<16}" + "".join(f"{outcome:>10}" for outcome in outcomes))
        for job in JOBS:
            print(f"{job.__name__:<16}" + "".join(f"{self.counts[job.__name__, each]:>10}" for each in outcomes))
        print("\n" + ", ".join(f"{count} {what}" for what, count in self.shortages.items()))


Sample = tuple[str, dict[str, str], float]


async def metrics(connection: Connection) -> list[Sample]:
    text = (await connection.ask("GET", "/metrics")).body.decode()
    families = text_string_to_metric_families(text)
    return [(each.name, dict(each.labels), each.value) for family in families for each in family.samples]


def unbalanced(samples: Sequence[Sample]) -> list[str]:
    """What an idle server should not have, by its metrics."""
    zero = ("mlxpaged_requests_running", "mlxpaged_requests_waiting", "mlxpaged_embedding_inputs_waiting")
    used = ("mlxpaged_kv_blocks", "mlxpaged_swap_blocks")
    return [
        f"{name} {labels} is {value:g}"
        for name, labels, value in samples
        if value and (name in zero or (name in used and labels["state"] == "used"))
    ]


def line_of(reading: Reading) -> str:
    usage = reading.usage
    return (
        f"{reading.seconds / 60:6.1f} min {reading.jobs:>8} jobs {reading.steps:>8.0f} steps "
        f"{usage.resident / 1e6:8.1f} MB resident {usage.private / 1e6:8.1f} private "
        f"{usage.descriptors:>4} descriptors {usage.threads:>3} threads {usage.cpu_seconds:7.0f} s CPU"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the load (default 0)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        paths = make_models(root / "models")
        others = ("hybrid", "other", "seeing", "judge")
        names = [part for name in others for part in ("--model", f"{name}={paths[name]}")]
        names += ["--adapter", f"adapted={paths['adapter']}"]
        flags = [str(paths["small"]), "--served-model-name", "small", *names, "--data-dir", str(root / "data")]
        embedder = ["--embedding-model", str(paths["vectors"]), "--served-embedding-model-name", "vectors"]
        with server_process([*flags, *embedder, *FLAGS], root) as server:
            soak = Soak(server, args.seed, make_cases(random.Random(args.seed), GENERATE, NUM_CASES, SEEING))
            asyncio.run(soak.run(args.minutes * 60))
            soak.print_counts()
            soak.check_growth()
        soak.check_log()
    print(f"\n{len(soak.faults)} faults" if soak.faults else "\nno fault", flush=True)
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
