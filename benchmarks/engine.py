"""The cost of an engine step beside mlx-lm's own with the same model, and the parts of the rest.

    python benchmarks/engine.py [--model llama hybrid latent] [--batch 1 4 16] [--context 128] [--steps 64]

Decode: a step of the engine and a bare forward pass of mlx-lm (its own cache, one static batch, greedy) on the same
weights, in turn, so that other load on the machine falls on both. Batched: the same beside mlx-lm's own continuous
batching, at the largest batch. Prefill: one prompt, in turn as well. Attention: one layer of the pool beside MLX's
attention over contiguous keys. The figure to quote is the median of the ratios; above 1 the engine is faster. The
profile has the parts of a decode step at the largest batch.

Then, for the first model: the host's work alone in CPU time, which other load hardly changes, and the cost of bringing
that many streams their tokens over HTTP, with clients in another process, with all that a server adds to the forward
pass. Last, what a Mac's host does for a decode step beside mlx-lm's own step: host.py says how, and prints the parts.

Models are directories, repositories, or names of models that are made if they are missing, random, in float32: `llama`,
which the comparison with other servers has (81 million parameters), `hybrid` and `latent` (engine_models.py).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.metadata import AttentionMetadata, HostStep
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import KV, LayerSpec, bytes_per_token
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.sources.resolve import resolve

# isort: split
import mlx.core as mx
from baselines import Bare, Batched, blas_threads
from comparison.environments import CACHE
from comparison.model import benchmark_model
from delivery import ENDING_STEPS, delivery_seconds
from engine_models import hybrid_model, latent_model
from host import compare, with_kernels
from mlx.nn.layers.base import Module
from mlx_lm.utils import load_model as load_weights


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """They differ in their first token, so that the prefix cache is of no help."""
    rng = random.Random(0)
    return [[i % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))] for i in range(count)]


class Engine:
    """Ours, without its thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._batch = self._count = 0

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds until every prompt is computed."""
        self.close()
        self._batch = len(prompts)
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for prompt in prompts:
            self._count += 1
            self.core.add(Request(f"request-{self._count}", prompt, params, time.monotonic()))
        while any(s.num_output_tokens == 0 for s in [*self.core.scheduler.running, *self.core.scheduler.waiting]):
            self.core.step()
        return time.perf_counter() - start

    def step(self) -> float:
        """Seconds of one token for every sequence."""
        if len(self.core.scheduler.running) != self._batch:
            raise RuntimeError(f"{len(self.core.scheduler.running)} of {self._batch} sequences run")
        start = time.perf_counter()
        self.core.step()
        self.core.stats()
        return time.perf_counter() - start

    def close(self) -> None:
        self.core.abort_all("measured")
        self.core.clear_cache()


FORWARD_PASS = ("device", "making the graph", "metadata")
"""Parts of a step that any server has: all else is what this one adds."""


class Profile(ExitStack):
    """Seconds by part of the steps inside `with`; what a part calls is counted with that other part only."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        for owner, name, part in (
            (core.scheduler, "schedule", "scheduler"),
            (core.scheduler, "update", "scheduler"),
            (HostStep, "build", "metadata"),
            (HostStep, "grown", "metadata"),
            (core.runner, "forward", "making the graph"),
            (core.sampler, "sample", "sampler"),
            (core.runner, "start_step", "device"),
            (core.runner, "finish_step", "device"),
            (InFlightStep, "read", "device"),
            (core.loop.results, "process", "detokenizer and outputs"),
            (core, "stats", "statistics"),
        ):
            self.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), part)))

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inner.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def parts(self, total: float, steps: int) -> dict[str, float]:
        """Seconds of one step, of `steps` that took `total` seconds."""
        parts = self.seconds | {"other": total - sum(self.seconds.values())}
        return {part: seconds / steps for part, seconds in parts.items()}


def share(part: str, seconds: float, step: float) -> str:
    return f"  {part:24} {1e3 * seconds:8.3f} ms {100 * seconds / step:6.2f} %"


class NoModel(Module):
    """Takes no time: the same logits for every token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._logits = mx.random.normal((1, 1, vocab_size), key=mx.random.key(0))

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        return mx.broadcast_to(self._logits, (*tokens.shape, self._logits.shape[-1]))


def host_times(served: ServedModel, batch: int, context: int, steps: int) -> list[float]:
    """Seconds of CPU time that the engine's thread spends on each of some decode steps."""
    layers: list[LayerSpec] = [*served.kv_layers[:1]]
    served = replace(served, model=NoModel(served.vocab_size), rows=None, layers=layers)
    kv_bytes = bytes_per_token(served.layers) * batch * (context + steps + 64)
    core = build_engine(
        EngineConfig(model="nothing", max_num_seqs=batch, kv_cache_bytes=kv_bytes, speculative="off"), served
    )
    engine = Engine(core)
    engine.prefill(make_prompts(batch, context, served.vocab_size), steps + 16)
    times = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    return times


class AttentionLayer:
    """`batch` sequences with one query token and `context` keys each: in the pool's blocks, and in one piece."""

    def __init__(self, spec: KV, block_size: int, batch: int, context: int) -> None:
        blocks = -(-context // block_size)
        order = random.Random(0).sample(range(batch * blocks), batch * blocks)
        tables = [order[i * blocks : (i + 1) * blocks] for i in range(batch)]
        layout = spec.kv_layout(block_size)
        heads, dtype = layout.num_kv_heads, layout.dtype
        self._build = partial(AttentionMetadata.build, [1] * batch, [context] * batch, tables, block_size)
        self._pool = LayerKVCache.from_layout(batch * blocks, layout)
        whole = [mx.random.normal((batch * blocks, *plane.shape)).astype(dtype) for plane in layout.planes]
        self._pool.write_blocks(order, *whole)
        sizes = (layout.key_size, layout.value_size)
        self._keys, self._values = (mx.random.normal((batch, heads, context, size)).astype(dtype) for size in sizes)
        shapes = [(batch, spec.num_query_heads, size) for size in layout.input_sizes]
        self._queries, q_pe = (mx.random.normal(shape).astype(dtype) for shape in shapes)
        self._whole = mx.concatenate([self._queries, q_pe], axis=-1) if layout.latent else self._queries
        self._q_pe = q_pe if layout.latent else None
        mx.eval(self._pool.arrays, self._keys, self._values, self._queries, self._whole, q_pe)

    def ours(self) -> float:
        start = time.perf_counter()
        mx.eval(self._pool.attend(self._queries, self._build(), scale=0.125, q_pe=self._q_pe))
        return time.perf_counter() - start

    def contiguous(self) -> float:
        start = time.perf_counter()
        queries = self._whole[:, :, None]
        with blas_threads():
            mx.eval(mx.fast.scaled_dot_product_attention(queries, self._keys, self._values, scale=0.125))
            return time.perf_counter() - start


def pairs(bare: Callable[[], float], ours: Callable[[], float], count: int) -> Iterator[tuple[float, float]]:
    for i in range(count):
        if i % 2:
            yield bare(), ours()
        else:
            second = ours()
            yield bare(), second


def line(name: str, measured: list[tuple[float, float]], tokens: int) -> str:
    theirs, ours = (statistics.median(column) for column in zip(*measured, strict=True))
    ratios = sorted(a / b for a, b in measured)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return (
        f"{name:22} {1e3 * theirs:9.2f} {1e3 * ours:9.2f} {tokens / theirs:10.1f} {tokens / ours:10.1f}"
        f"   {statistics.median(ratios):.3f} ({low:.2f} to {high:.2f})"
    )


MADE: dict[str, Callable[[Path], Path]] = {"llama": benchmark_model, "hybrid": hybrid_model, "latent": latent_model}
"""Models by the names of the option."""


@dataclass(frozen=True)
class Sizes:
    """What is measured; the options of the same names."""

    batch: list[int]
    context: int
    prefill: list[int]
    attention: list[int]
    host: list[int]
    steps: int


class Measurement:
    """One model, loaded twice: by the engine and by mlx-lm."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        path = str(MADE[name](CACHE) if name in MADE else name)
        self._sizes, self._largest = sizes, max(sizes.batch)
        self.served = load_model(path)
        self._plain: Any = load_weights(resolve(path).directory)[0]
        useful = self._largest * (sizes.context + sizes.steps + 64) + max(sizes.prefill) + 64
        self.config = EngineConfig(
            speculative="off",
            model=path,
            max_num_seqs=self._largest,
            # All prompts in one step: who was ready first would be at the end of its answer before the last began.
            max_num_batched_tokens=max(*sizes.prefill, self._largest * sizes.context),
            max_step_ms=0,
            kv_cache_bytes=bytes_per_token(self.served.layers) * useful,
        )
        self._engine = Engine(build_engine(self.config, self.served))

    def _prompts(self, batch: int) -> list[list[int]]:
        return make_prompts(batch, self._sizes.context, self.served.vocab_size)

    def rows(self) -> Iterator[str]:
        """The lines of the table."""
        bare, batched, engine = Bare(self._plain), Batched(self._plain), self._engine
        largest, steps = self._largest, self._sizes.steps
        for length in self._sizes.prefill:
            prompt = make_prompts(1, length, self.served.vocab_size)
            bare.prefill(prompt), engine.prefill(prompt, 2)
            measured = list(pairs(partial(bare.prefill, prompt), partial(engine.prefill, prompt, 2), 8))
            yield line(f"prefill of {length}", measured, length)
        for context in self._sizes.attention if self.served.kv_layers else []:
            layer = AttentionLayer(self.served.kv_layers[0], self.config.block_size, largest, context)
            layer.ours(), layer.contiguous()
            yield line(f"attention, {largest} x {context}", list(pairs(layer.contiguous, layer.ours, 20)), largest)
            del layer
        for batch in self._sizes.batch:
            prompts = self._prompts(batch)
            bare.prefill(prompts), engine.prefill(prompts, steps + 16)
            list(pairs(bare.step, engine.step, 4))
            yield line(f"decode, batch {batch}", list(pairs(bare.step, engine.step, steps)), batch)
        prompts = self._prompts(largest)
        batched.prefill(prompts, steps + 16)
        engine.prefill(prompts, steps + 16)
        list(pairs(batched.step, engine.step, 4))
        yield line(f"batched, {largest}", list(pairs(batched.step, engine.step, steps)), largest)

    def parts(self) -> dict[str, float]:
        """Seconds by part of a decode step at the largest batch."""
        engine, steps = self._engine, self._sizes.steps
        with Profile(engine.core) as profile:
            engine.prefill(self._prompts(self._largest), steps + 16)
            profile.seconds.clear()
            total = sum(engine.step() for _ in range(steps))
            return profile.parts(total, steps)


def print_server_costs(measurement: Measurement, parts: dict[str, float], sizes: Sizes) -> None:
    """parts: seconds by part of a decode step at the largest batch."""
    print("\nCPU time of the engine's thread, with a model that computes nothing:")
    for size in sizes.host:
        median = statistics.median(host_times(measurement.served, size, sizes.context, sizes.steps))
        print(f"  decode, batch {size:<10} {1e3 * median:8.3f} ms")
    step, batch = sum(parts.values()), max(sizes.batch)
    room = bytes_per_token(measurement.served.layers) * batch * (sizes.steps + 2 * ENDING_STEPS)
    delivery = delivery_seconds(replace(measurement.config, kv_cache_bytes=room), batch, sizes.steps)
    print(f"\ndelivery of a decode step's tokens to {batch} streams over HTTP, in shares of the step above:")
    for part, seconds in zip(("hand-over", "event loop, CPU time"), delivery, strict=True):
        print(share(part, seconds, step))
    added = sum(delivery) + sum(seconds for part, seconds in parts.items() if part not in FORWARD_PASS)
    print(share("with all above but", added, step) + f": {', '.join(FORWARD_PASS)}")


def print_graph_building(sizes: Sizes) -> None:
    print("\ngraph building of a decode step on the Metal backend, CPU time:")
    for kind in ("dense", "hybrid"):
        for batch in sizes.batch:
            print(f"  {compare(kind, batch, sizes.context, sizes.steps)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MADE), help=f"default: {' '.join(MADE)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="+", default=[512])
    parser.add_argument("--attention", type=int, nargs="+", default=[2000], help="keys of a sequence (default 2000)")
    parser.add_argument("--host", type=int, nargs="+", default=[16, 64], help="batches (default 16 64)")
    parser.add_argument("--steps", type=int, default=64)
    args = vars(parser.parse_args())
    models, sizes = args.pop("model"), Sizes(**args)
    if min(*sizes.batch, *sizes.prefill, *sizes.attention, sizes.context, sizes.steps) < 1:
        parser.error("all numbers must be at least 1")
    print(f"{mx.default_device()}, {blas.describe()}")
    for name in models:
        measurement = Measurement(name, sizes)
        print(f"\n{name}, {measurement.served.weight_bytes / 1e6:.1f} MB of weights\n")
        print(f"{'':22} {'mlx-lm ms':>9} {'ours ms':>9} {'tok/s':>10} {'ours tok/s':>10}   ratio (10 % to 90 %)")
        for row in measurement.rows():
            print(row, flush=True)
        parts = measurement.parts()
        step, batch = sum(parts.values()), max(sizes.batch)
        print(f"\nprofile of a decode step at batch {batch}: {1e3 * step:.2f} ms")
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
            print(share(part, seconds, step))
        if name == models[0]:
            print_server_costs(measurement, parts, sizes)
            with_kernels(partial(print_graph_building, sizes))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as in mlxpaged/cli/exit.py: the server of the last table had an engine thread
