"""What --prefix-cache-dir brings after a restart, and what reading a prefix does to streams.

    python benchmarks/disk_prefixes.py [--tokens 8000] [--streams 4] [--rounds 3]

TTFT of one prompt in this process: computed, found in memory, and read from the disk by a new engine, for the
comparison's Llama and the hybrid of engine.py. The files are dropped from the system's cache first, if it has a call
for that. Then streams of the Llama decode alone, and while the prompt is read from the disk. The figures to quote are
the ratios.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.parts.disk.disk_tier import NO_TIER, PREFIX

# isort: split
import mlx.core as mx
from comparison.environments import CACHE
from comparison.model import benchmark_model
from engine_models import hybrid_model
from streams import ends_after, gaps, once_added, print_gaps


def prompt_of(number: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(10, 250, tokens)]


def ttft(core: EngineCore, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the tokens that were not computed."""
    started = core.clock()
    core.add(Request("prompt", prompt, SamplingParams(max_tokens=1, temperature=0.0), started))
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            found = output.time - started, output.num_cached_tokens
    return found


def end(core: EngineCore, directory: Path) -> None:
    """Store what the pool has, and forget the files that were written."""
    core.keep_prefixes()
    core.close()
    for path in directory.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def restart(make: Callable[[], EngineCore], directory: Path, prompt: list[int]) -> EngineCore:
    """Prints the TTFT of all kinds. Returns an engine that has the prompt on the disk and in memory."""
    core = make()
    ttft(core, prompt[:100])  # compiles, and tells the scheduler what prompts cost
    cold, _ = ttft(core, prompt)
    warm, cached = ttft(core, prompt)
    end(core, directory)
    core = make()
    ttft(core, prompt_of(2, 100))
    read, loaded = ttft(core, prompt)
    tier = core.stats().of(NO_TIER)
    print(f"{core.served.name}: {len(prompt)} tokens, {tier.store.size / 1e6:.0f} MB in {tier.store.blocks} blocks")
    print(f"{'':24} {'TTFT s':>8} {'ratio':>8} {'tokens not computed':>20}")
    for name, seconds, tokens in (
        ("computed", cold, 0),
        ("in memory", warm, cached),
        ("after a restart", read, loaded),
    ):
        print(f"{name:24} {seconds:8.3f} {seconds / cold:8.4f} {tokens:20}")
    return core


def compare(core: EngineCore, streams: int, rounds: int, seconds: float, prompt: list[int]) -> None:
    """Prints the inter-token times of streams alone, and beside a prompt that is read."""
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    for _ in range(rounds):
        alone += gaps(core, streams, ends_after(seconds))
        core.scheduler.clear_cache()
        request = Request("prompt", prompt, SamplingParams(max_tokens=1, temperature=0.0), core.clock())
        # The last step may compute the prompt's last tokens.
        beside += gaps(core, streams, once_added(core, request, lambda: not core.scheduler.held[PREFIX]))[:-1]
    print(f"{streams} streams: {len(alone)} steps alone, {len(beside)} beside a prompt that is read")
    if beside:
        print_gaps(alone, beside, "beside")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of streams alone, and beside a prompt that is read")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which the streams of a round run alone")
    parser.add_argument("--models", nargs="*", type=Path, help="default: the two, made from a seed")
    args = parser.parse_args()
    models = args.models or [hybrid_model(CACHE), benchmark_model(CACHE)]
    print(f"{mx.default_device()}, BLAS: {blas.describe()}")
    prompt = prompt_of(1, args.tokens)
    for path in models:
        with tempfile.TemporaryDirectory(dir=CACHE if CACHE.exists() else None) as folder:
            directory, served = Path(folder), load_model(str(path))
            config = EngineConfig(
                str(path), max_num_seqs=args.streams + 1, prefix_cache_dir=directory, speculative="off"
            )
            core = restart(lambda: build_engine(config, served), directory, prompt)  # noqa: B023
            if path == models[-1]:
                compare(core, args.streams, args.rounds, args.seconds, prompt)
            core.close()


if __name__ == "__main__":
    main()
