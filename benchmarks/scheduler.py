"""What the scheduler itself costs, and how fair it is. Plain Python without a model; clock and tokens are simulated.

    python benchmarks/scheduler.py [--sequences 10000] [--blocks 1000000] [--steps 200] [--minutes 60]

Cost: the median time of `schedule` and `update` of one step, while one size grows and the others stay. It should grow
with the batch, and not with the queue, the pool, the cache or the lengths of running and waiting sequences.
Fairness: arrivals of all three classes at several loads for an hour of simulated time; how long each class waits for
its first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence
from mlxpaged.core.step import Step


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Case:
    """Sizes of one measurement. `waiting` sequences find no room if they are larger than the rest of the pool."""

    batch: int = 32
    waiting: int = 0
    blocks: int = 100_000
    cached_share: float = 0.0
    running_tokens: int = 512
    waiting_tokens: int = 512
    shared_tokens: int = 0
    """Tokens of the waiting prompts that are in the prefix cache."""
    full: bool = False
    """Only cached blocks are free, so that every step examines the first sequences of the queue."""
    deadlines: bool = False
    """Every waiting sequence has one, in random order."""
    running_priority: Priority = Priority.NORMAL
    waiting_priority: Priority = Priority.NORMAL


def prompt(number: int, length: int, shared: int = 0) -> list[int]:
    """Tokens of this number only, after `shared` ones that are the same for all numbers."""
    return [*range(shared), *range(10**9 + number * 10**6, 10**9 + number * 10**6 + length - shared)]


def commit(scheduler: Scheduler, batch: Step) -> list[Sequence]:
    """Every sampling row gets a token; answers of full length end. Returns the sequences that got one."""
    sampled = [scheduler.sequences[row.sequence_id] for row in batch.rows if row.samples]
    scheduler.update(batch, {sequence.sequence_id: [1] for sequence in sampled})
    for sequence in sampled:
        reason = sequence.finish_reason_after(1, sequence.num_output_tokens)
        if reason is not None:
            scheduler.finish(sequence.sequence_id, reason)
    return sampled


def run_step(scheduler: Scheduler) -> None:
    commit(scheduler, scheduler.schedule())


def fill_cache(scheduler: Scheduler, count: int) -> None:
    """Chains of 100 unused cached blocks."""
    cache, pool = scheduler.prefix_cache, scheduler.pool
    assert cache is not None
    tokens = (0,) * BLOCK_SIZE
    for start in range(0, count, 100):
        blocks = pool.allocate(min(100, count - start))
        parent = None
        for index, block in enumerate(blocks):
            parent = cache.insert((start + index).to_bytes(16, "big"), parent, tokens, [block])
        pool.release(reversed(blocks))


def prepare(case: Case, steps: int) -> Scheduler:
    """A scheduler in which `batch` sequences decode and `waiting` wait."""
    config = SchedulerConfig(
        num_blocks=case.blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=case.batch + (8 if case.full else 0),
        max_num_batched_tokens=8192,
    )
    scheduler = Scheduler(config, Clock())
    fill_cache(scheduler, int(case.cached_share * case.blocks))
    if case.shared_tokens:
        scheduler.add(Sequence(10**6, prompt(0, case.shared_tokens + 1, case.shared_tokens), 1))
        while scheduler.has_unfinished():
            run_step(scheduler)
    for number in range(case.batch):
        running = Sequence(
            number,
            prompt(number, case.running_tokens, case.shared_tokens),
            steps + 600,
            frozenset(),
            case.running_priority,
        )
        scheduler.add(running)
    while any(sequence.num_output_tokens == 0 for sequence in [*scheduler.running, *scheduler.waiting]):
        run_step(scheduler)
    if case.full:  # the free blocks are taken, except a reserve for the running sequences
        usage = scheduler.pool.usage()
        reserve = case.batch * (steps // BLOCK_SIZE + 2)
        scheduler.pool.allocate(usage.free + usage.cached - reserve - case.shared_tokens // BLOCK_SIZE)
    rng = random.Random(0)
    for number in range(case.waiting):
        waiting = Sequence(
            case.batch + number,
            prompt(case.batch + number, case.waiting_tokens, case.shared_tokens),
            64,
            frozenset(),
            case.waiting_priority,
        )
        if case.deadlines:
            waiting.deadline = rng.uniform(100, 1000)
        scheduler.add(waiting)
    for _ in range(3):
        run_step(scheduler)
    return scheduler


def cost(case: Case, steps: int) -> tuple[float, float]:
    """Median and 99th percentile of the microseconds of a step."""
    scheduler = prepare(case, steps)
    times = []
    for _ in range(steps):
        for sequence in scheduler.waiting.first(8):
            sequence.skipped_steps = 0  # or the starvation bound would admit one of them
        start = time.perf_counter()
        run_step(scheduler)
        times.append(1e6 * (time.perf_counter() - start))
    if len(scheduler.running) != case.batch or len(scheduler.waiting) != case.waiting:
        raise RuntimeError(f"{case} did not stay as it was: {scheduler.stats()}")
    return statistics.median(times), statistics.quantiles(times, n=100, method="inclusive")[98]


def print_costs(sequences: int, blocks: int, steps: int) -> None:
    def rows(sizes: list[int], make: Callable[[int], Case]) -> list[tuple[int, Case]]:
        return [(size, make(size)) for size in sizes]

    queue_sizes = sorted({0, 100, max(1, sequences // 10), sequences})
    pool_sizes = sorted({max(1_000, blocks // 100), max(1_000, blocks // 10), blocks})
    prompt_sizes = [1_000, 10_000, 100_000]
    long = max(blocks // 5, 40_000)
    groups: list[tuple[str, list[tuple[int, Case]]]] = [
        ("batch", rows([1, 8, 32, 128, 256], lambda n: Case(batch=n))),
        ("waiting for a slot", rows(queue_sizes, lambda n: Case(waiting=n))),
        ("the same with deadlines", rows(queue_sizes, lambda n: Case(waiting=n, deadlines=True))),
        ("waiting for blocks", rows(queue_sizes, lambda n: Case(waiting=n, full=True, waiting_tokens=8_192))),
        ("blocks in the pool", rows(pool_sizes, lambda n: Case(blocks=n))),
        ("% of the pool cached", rows([0, 40, 80], lambda n: Case(blocks=blocks, cached_share=n / 100))),
        ("tokens of each running", rows(prompt_sizes, lambda n: Case(batch=8, running_tokens=n, blocks=long))),
        (
            "tokens of each waiting",
            rows(prompt_sizes, lambda n: Case(batch=4, waiting=8, full=True, waiting_tokens=4 * n, blocks=long)),
        ),
        (
            "of it in the cache",
            rows(
                prompt_sizes,
                lambda n: Case(batch=4, waiting=8, full=True, waiting_tokens=4 * n, shared_tokens=n, blocks=long),
            ),
        ),
        (
            "tokens of each LOW beside HIGH waiting",
            rows(
                prompt_sizes,
                lambda n: Case(
                    batch=8,
                    waiting=2,
                    full=True,
                    running_tokens=n,
                    waiting_tokens=12 * n,
                    blocks=long,
                    running_priority=Priority.LOW,
                    waiting_priority=Priority.HIGH,
                ),
            ),
        ),
    ]
    print(f"{'growing':38}  {'size':>9}  {'median us':>9}  {'p99 us':>8}  us per sequence")
    for name, cases in groups:
        for size, case in cases:
            median, p99 = cost(case, steps)
            print(f"{name:38}  {size:9,}  {median:9.0f}  {p99:8.0f}  {median / case.batch:.1f}")


@dataclass
class Arrivals:
    """Outcome of a simulation. waits: seconds to the first token, by class."""

    waits: dict[Priority, list[float]] = field(default_factory=lambda: {priority: [] for priority in Priority})
    refused: int = 0
    unserved: int = 0
    oldest: float = 0.0
    preemptions: int = 0
    starved: int = 0


CAPACITY = 2.1
"""Requests a second that the simulated server can serve: measured with a load far above it."""

SHARES = {Priority.HIGH: 0.2, Priority.NORMAL: 0.5, Priority.LOW: 0.3}


def simulate(load: float, seconds: float, max_queue: int = 200, seed: int = 0) -> Arrivals:
    """Requests of 64 to 2,000 prompt tokens and 16 to 400 new ones arrive at random, `load` times as many as can be
    served. A step takes 30 ms and 0.1 ms a token, as a small model does on a laptop."""
    rng = random.Random(seed)
    clock = Clock()
    config = SchedulerConfig(num_blocks=600, max_num_seqs=16, max_num_batched_tokens=512, num_swap_slots=200)
    scheduler = Scheduler(config, clock)
    result = Arrivals()
    waiting: dict[int, Sequence] = {}
    per_second = load * CAPACITY
    number, due = 0, rng.expovariate(per_second)
    while clock.now < seconds:
        while due <= clock.now:
            if len(scheduler.waiting) >= max_queue:
                result.refused += 1
            else:
                [priority] = rng.choices(list(SHARES), list(SHARES.values()))
                length = int(64 * (2000 / 64) ** rng.random())
                new = Sequence(number, prompt(number, length), rng.randint(16, 400), frozenset(), priority, due)
                scheduler.add(new)
                waiting[number] = new
                number += 1
            due += rng.expovariate(per_second)
        if not scheduler.has_unfinished():
            clock.now = due
            continue
        batch = scheduler.schedule()
        clock.now += 0.03 + 1e-4 * batch.num_tokens
        for sequence in commit(scheduler, batch):
            if waiting.pop(sequence.sequence_id, None) is not None:
                result.waits[sequence.priority].append(clock.now - sequence.arrival_time)
    result.unserved = len(waiting)
    result.oldest = max((clock.now - sequence.arrival_time for sequence in waiting.values()), default=0.0)
    stats = scheduler.stats()
    result.preemptions, result.starved = stats.preemptions_total, stats.starvation_admissions_total
    for sequence in [*scheduler.running, *scheduler.waiting]:
        scheduler.finish(sequence.sequence_id, FinishReason.ABORT)
    if scheduler.pool.usage().used or scheduler.stats().swap.used:
        raise RuntimeError(f"blocks were lost: {scheduler.stats()}")
    return result


def print_fairness(minutes: float) -> None:
    print(f"\nSeconds to the first token, {minutes:g} simulated minutes; at most 200 wait, more are refused")
    print("load  class    served     p50     p99     max  refused  preempted  starved  still waiting, oldest")
    for load in (0.5, 0.8, 0.95, 1.1, 1.5):
        result = simulate(load, 60 * minutes)
        for priority, waits in result.waits.items():
            percentiles = statistics.quantiles(waits, n=100, method="inclusive") if len(waits) > 1 else [0.0] * 99
            rest = ""
            if priority is Priority.HIGH:
                rest = (
                    f"  {result.refused:7}  {result.preemptions:9}  {result.starved:7}  "
                    f"{result.unserved:4}, {result.oldest:.0f} s"
                )
            print(
                f"{load:4}  {priority.name:7}  {len(waits):6}  {percentiles[49]:6.1f}  {percentiles[98]:6.1f}  "
                f"{max(waits, default=0):6.1f}{rest}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args()
    print_costs(args.sequences, args.blocks, args.steps)
    print_fairness(args.minutes)


if __name__ == "__main__":
    main()
