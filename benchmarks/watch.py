"""What the page's status stream costs while a page watches.

    python benchmarks/watch.py [--streams 32] [--snapshots 20]

The engine serves the demo model to so many streams. A snapshot is taken twice a second, as for the page. Measured are
the steps between two snapshots, and the CPU time of a snapshot: on the engine thread, and with the event's JSON on the
event loop. CPU time is measured, because a wait for the interpreter lock depends on other load. The map of a large pool
is measured alone: the demo model's pool is small.

The figure to quote is the share: CPU time of the snapshots, divided by the time of the steps between them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.server import Server
from mlxpaged.api.status_stream import PERIOD_SECONDS, StatusStream, block_map
from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.registry import Registry

PROMPT_TOKENS, SHARED_TOKENS = 160, 96
VOCABULARY = 256
"""The demo model has more tokens than this."""
POOL_BLOCKS = (1024, 8192, 65536)


def requests(count: int) -> list[Request]:
    """Each four share the first blocks of their prompts. None ends before the measurement does."""
    source = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [source.randrange(16, VOCABULARY) for _ in range(number)]

    prefixes = [tokens(SHARED_TOKENS) for _ in range(-(-count // 4))]
    params = SamplingParams(temperature=0.0, max_tokens=3500, ignore_eos=True)
    return [
        Request(f"stream-{i}", prefixes[i // 4] + tokens(PROMPT_TOKENS - SHARED_TOKENS), params, time.monotonic())
        for i in range(count)
    ]


async def measure(streams: int, snapshots: int) -> None:
    registry = Registry.of(EngineConfig(max_num_seqs=streams, kv_cache_bytes=10**9))
    registry.start()
    await registry.wait_loaded()
    server = Server(registry, time.monotonic, HttpConfig())
    engine = registry.default.engine
    assert engine is not None
    stream = StatusStream(server)
    with engine.reserve(streams):
        submitted = engine.submit(requests(streams))
    while (await engine.status()).scheduler.running < streams:
        await asyncio.sleep(0.1)
    costs, steps, sizes = [], [], []
    for number in range(snapshots + 2):
        before, started = (await engine.status()).steps_total, time.monotonic()
        await asyncio.sleep(PERIOD_SECONDS)
        text, seconds = await stream.event()
        seen = await engine.status()
        assert len(seen.running) == streams, "a request ended: take fewer snapshots"
        if number >= 2:  # the first ones import modules
            costs.append(seconds)
            steps.append((time.monotonic() - started) / (seen.steps_total - before))
            sizes.append(len(text))
    engine.end_all("measured")
    await server.close()
    del submitted
    step, cost = statistics.median(steps), statistics.median(costs)
    blocks = seen.scheduler.blocks
    print(f"streams {streams}, blocks {blocks.used + blocks.cached + blocks.free}, event {max(sizes) / 1000:.1f} kB")
    print(f"step      {step * 1e3:8.2f} ms")
    print(f"snapshot  {cost * 1e3:8.2f} ms of CPU time, every {PERIOD_SECONDS} s")
    print(f"share     {cost / PERIOD_SECONDS:8.2%} of the steps' time")


def measure_map(num_blocks: int) -> None:
    """A pool of which a half is used and a quarter is cached."""
    pool: BlockPool[int] = BlockPool(num_blocks)
    blocks = pool.allocate(num_blocks * 3 // 4)
    for block in blocks:
        pool.remember(block, block)
    pool.release(blocks[: num_blocks // 4])
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        states = pool.states()
        on_engine_thread = time.thread_time()
        block_map(states)
        seconds.append((on_engine_thread - started, time.thread_time() - on_engine_thread))
    engine, loop = (statistics.median(part) * 1e3 for part in zip(*seconds, strict=True))
    print(f"map of {num_blocks:6} blocks: {engine:6.3f} ms on the engine thread, {loop:6.3f} ms on the event loop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--snapshots", type=int, default=20)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.streams, arguments.snapshots))
    for num_blocks in POOL_BLOCKS:
        measure_map(num_blocks)


if __name__ == "__main__":
    main()
