"""Prompts beside streams, by the scheduler alone: the steps of simulated devices take as long as published.

    python benchmarks/prompts.py

One prompt: 4,000 tokens that come while 1, 4 or 16 sequences decode. Flood: 48 prompts of 200 to 3,000 tokens that come
at once while 8 sequences decode. The times are those of the steps; nothing else costs time here.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.step_cost import chunk_keys

TIMED_ROWS = (1, 2, 4, 8, 16, 32, 33, 64, 128)
"""Rows of the steps that are timed before the first request."""

PROMPT_TOKENS = 4000
FLOOD = [200, 1500, 600, 3000, 300, 1000] * 8


@dataclass(frozen=True)
class Device:
    """points: (rows, seconds) of a step with short contexts, up to one tile; between them it is linear. Further tiles
    take tile_seconds each. decode_key, prompt_key: seconds of each key that a token attends to."""

    name: str
    tiles: RowTiles
    points: tuple[tuple[int, float], ...]
    tile_seconds: float
    decode_key: float
    prompt_key: float

    def row_seconds(self, rows: int) -> float:
        last, longest = self.points[-1]
        if rows > last:
            return longest + (-(-rows // self.tiles.rows) - last // self.tiles.rows) * self.tile_seconds
        high = next(i for i, (count, _) in enumerate(self.points) if count >= rows)
        (low, before), (count, after) = self.points[max(0, high - 1)], self.points[high]
        return after if count == rows else before + (after - before) * (rows - low) / (count - low)

    def seconds(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]]) -> float:
        rows = len(contexts) + sum(tokens for _, tokens in chunks)
        keys = self.decode_key * sum(contexts) + self.prompt_key * sum(chunk_keys(*chunk) for chunk in chunks)
        return self.row_seconds(max(1, rows)) + keys


TILES = RowTiles(32)
M3_MAX = Device(
    "M3 Max, 8B in 4 bits", TILES, ((1, 0.014), (4, 0.018), (12, 0.029), (32, 0.029)), 0.0276, 3.3e-7, 5.2e-8
)
"""14 ms for one row, 1.29 times that for four, and 0.513 ms for 32 rows against 1.002 for 33 (ml-explore/mlx#3863)."""
M1 = Device("M1, 4B in 4 bits", TILES, ((1, 0.038), (5, 0.15), (6, 0.15), (32, 0.15)), 0.15, 2.5e-6, 3.3e-7)
"""Reads its weights again for each row up to 6: each takes 0.8 times as long as the first."""
M4_MAX = Device(
    "M4 Max, 8B in 4 bits", TILES, ((1, 0.0105), (4, 0.0135), (12, 0.023), (32, 0.023)), 0.022, 2.4e-7, 4e-8
)
CPU = Device("2 cores, 80M", ANY_ROWS, ((1, 0.052), (32, 0.114)), 0.002, 1e-6, 8e-7)
"""As this repository's demo model on two cores of a server."""
DEVICES = [M1, M3_MAX, M4_MAX, CPU]


@dataclass
class Step:
    """plain: what it would have taken without prompts. streams: how many got a token."""

    seconds: float
    plain: float
    streams: int


@dataclass
class Simulation:
    """A scheduler that has timed its device as a server does at its start, and then answered a few prompts."""

    device: Device
    tiles: RowTiles | None = None
    """None: those of the device."""
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        tiles = self.device.tiles if self.tiles is None else self.tiles
        config = SchedulerConfig(num_blocks=100_000, max_num_seqs=64, max_num_batched_tokens=2048, tiles=tiles)
        self.scheduler = Scheduler(config, lambda: self.now)
        self.scheduler.times.learn_rows({rows: self.device.row_seconds(rows) for rows in TIMED_ROWS})
        self._count = 0
        for tokens in (300, 900, 2000):
            self.finish([self.add(tokens)])

    def add(self, tokens: int, max_tokens: int = 1) -> Sequence:
        """A prompt of tokens that no other has."""
        self._count += 1
        prompt = [self._count * 10_000 + i for i in range(tokens)]
        sequence = Sequence(self._count, prompt, max_tokens, arrival_time=self.now)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        batch = self.scheduler.schedule()
        contexts = [row.context_len for row in batch.rows if row.num_tokens == 1]
        chunks = [(row.start, row.num_tokens) for row in batch.rows if row.num_tokens > 1]
        seconds = self.device.seconds(contexts, chunks)
        self.now += seconds
        self.scheduler.times.observe(batch, seconds)
        sampled = [self.scheduler.sequences[row.sequence_id] for row in batch.rows if row.samples]
        self.scheduler.update(batch, {sequence.sequence_id: [1] for sequence in sampled})
        for sequence in sampled:
            if (reason := sequence.finish_reason_after(1, sequence.num_output_tokens)) is not None:
                self.scheduler.finish(sequence.sequence_id, reason)
        self.steps.append(Step(seconds, self.device.seconds(contexts, []), len(contexts)))
        return self.steps[-1]

    def finish(self, prompts: ListOf[Sequence]) -> list[Step]:
        """The steps until each of these has its first token."""
        before = len(self.steps)
        while any(prompt.num_output_tokens == 0 for prompt in prompts):
            self.step()
        return self.steps[before:]

    def stream(self, count: int) -> float:
        """Let so many sequences decode. Returns the seconds of their step."""
        self.finish([self.add(300 + 20 * number, 100_000) for number in range(count)])
        return statistics.mean(self.step().seconds for _ in range(20)) if count else 0.0


@dataclass(frozen=True)
class Beside:
    """A prompt beside streams: seconds until its first token, alone and beside them; of a plain step; of the mean and
    of the longest step."""

    alone: float
    seconds: float
    plain: float
    mean: float
    longest: float


def one_prompt(device: Device, streams: int, tiles: RowTiles | None = None) -> Beside:
    alone = Simulation(device, tiles)
    simulation = Simulation(device, tiles)
    plain = simulation.stream(streams)
    taken = [step.seconds for step in simulation.finish([simulation.add(PROMPT_TOKENS)])]
    first = sum(step.seconds for step in alone.finish([alone.add(PROMPT_TOKENS)]))
    return Beside(first, sum(taken), plain, statistics.mean(taken), max(taken))


@dataclass(frozen=True)
class Flood:
    """Many prompts beside streams. first: seconds to the first token by the length of the prompt, the median."""

    steps: list[Step]
    first: dict[int, float]

    @property
    def plain(self) -> float:
        """Mean seconds of the steps if they had no prompts."""
        return statistics.mean(step.plain for step in self.steps)

    @property
    def mean(self) -> float:
        return statistics.mean(step.seconds for step in self.steps)

    @property
    def share(self) -> float:
        """Of the device's time, that prompts get."""
        return 1 - self.plain / self.mean


def flood(device: Device, streams: int = 8) -> Flood:
    simulation = Simulation(device)
    simulation.stream(streams)
    began, arrived = len(simulation.steps), simulation.now
    waiting = [simulation.add(tokens) for tokens in FLOOD]
    first: dict[int, list[float]] = {tokens: [] for tokens in FLOOD}
    while waiting:
        simulation.step()
        for prompt in [each for each in waiting if each.num_output_tokens]:
            first[prompt.num_prompt_tokens].append(simulation.now - arrived)
            waiting.remove(prompt)
    return Flood(simulation.steps[began:], {tokens: statistics.median(first[tokens]) for tokens in sorted(first)})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{PROMPT_TOKENS} tokens beside streams: seconds, times alone; mean inter-token time, times plain; longest")
    for device in DEVICES:
        for streams in (1, 4, 16):
            one = one_prompt(device, streams)
            times = f"{one.seconds:5.1f} s {one.seconds / one.alone:5.2f}   {1000 * one.mean:4.0f} ms"
            print(f"{device.name:22} {streams:2}  {times} {one.mean / one.plain:5.2f}  {1000 * one.longest:4.0f} ms")
    print(f"\n{len(FLOOD)} prompts of {min(FLOOD)} to {max(FLOOD)} tokens at once beside 8 streams")
    print("mean, longest inter-token time; share of the time and tokens/s of prompts; first token by length, seconds")
    for device in DEVICES:
        found = flood(device)
        total = sum(step.seconds for step in found.steps)
        longest = max(step.seconds for step in found.steps)
        first = ", ".join(f"{tokens}: {seconds:.1f}" for tokens, seconds in found.first.items())
        times = f"plain {1000 * found.plain:4.0f} ms, {1000 * found.mean:4.0f}, {1000 * longest:4.0f}"
        print(f"{device.name:22} {times}; {100 * found.share:.0f}%, {sum(FLOOD) / total:.0f}; {first}")


if __name__ == "__main__":
    main()
