"""The cost of an engine step beside the bare forward pass of the same model, and the parts of the rest.

    python benchmarks/engine.py [--model DIR] [--batch 1 4 16] [--context 128] [--steps 64]

Decode: a step of the engine and a step of plain mlx-lm (its own KV cache, a static batch, greedy) on the same weights,
in turn, so that other load on the machine falls on both. Prefill: one prompt, in turn as well. Attention: one layer of
the pool beside MLX's attention over contiguous keys. The figure to quote is the median of the ratios; above 1 the
engine is faster. The profile has the parts of a decode step at the largest batch. The host's work alone is given in CPU
time, which other load hardly changes. The last table has the cost of bringing that many streams their tokens over HTTP,
with clients in another process, and all that a server adds to the forward pass. Without --model: the model of the
comparison with other servers (80 million parameters, float32), which is made if it is missing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from mlxpaged.attention import AttentionMetadata, LayerKVCache
from mlxpaged.cpu import blas, streams  # before mlx: it loads the fast BLAS
from mlxpaged.cpu.optimize import swiglu_by_exp2, swiglu_of_mlx_lm
from mlxpaged.engine import EngineConfig, EngineCore, Request, SamplingParams, build_engine
from mlxpaged.engine.step import InFlightStep
from mlxpaged.models import ServedModel, load_model
from mlxpaged.models.layers import KV, bytes_per_token
from mlxpaged.models.loader import resolve_model

# isort: split
import mlx.core as mx
from comparison.environments import CACHE
from comparison.model import benchmark_model
from delivery import ENDING_STEPS, delivery_seconds
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_weights


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """They differ in their first token, so that the prefix cache is of no help."""
    rng = random.Random(0)
    return [[i % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))] for i in range(count)]


def stay_awake(seconds: float) -> None:
    """A virtual machine that sleeps is slow for a while after."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def blas_threads() -> Iterator[None]:
    """Lets MLX's own operations use the BLAS on all cores; mlxpaged splits its work among CPU streams instead."""
    blas.use_threads(streams.cores())
    try:
        yield
    finally:
        blas.use_threads(1)
        stay_awake(0.03)  # as long as the BLAS's threads keep their cores busy


class Bare:
    """mlx-lm's model with mlx-lm's cache, and the BLAS on all cores."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules: list[Any] = [
            sys.modules[name] for name in {type(module).__module__ for module in model.modules()}
        ]

    def _logits(self, tokens: mx.array) -> mx.array:
        """Uses mlx-lm's own activation, which loading the engine's model has replaced."""
        routed = [module for module in self._modules if getattr(module, "swiglu", None) is swiglu_by_exp2]
        for module in routed:
            module.swiglu = swiglu_of_mlx_lm
        try:
            logits: mx.array = self._model(tokens, cache=self._cache)
            return logits
        finally:
            for module in routed:
                module.swiglu = swiglu_by_exp2

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds."""
        self._cache = make_prompt_cache(self._model)
        start = time.perf_counter()
        logits = self._logits(mx.array(prompts))
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        with blas_threads():
            mx.eval(self._tokens, [layer.state for layer in self._cache])
            return time.perf_counter() - start

    def step(self) -> float:
        """Seconds of one token for every sequence."""
        start = time.perf_counter()
        logits = self._logits(self._tokens[:, None])
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        with blas_threads():
            self._tokens.tolist()
            return time.perf_counter() - start


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


class Profile:
    """Seconds by part of the step; what a part calls is counted with that other part only."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        for owner, name, part in (
            (core.scheduler, "schedule", "scheduler"),
            (core.scheduler, "update", "scheduler"),
            (core.scheduler, "get_block_tables", "scheduler"),
            (AttentionMetadata, "upload", "metadata"),
            (core.runner, "forward", "making the graph"),
            (core.sampler, "sample", "sampler"),
            (core.runner, "start_step", "device"),
            (core.runner, "finish_step", "device"),
            (InFlightStep, "read", "device"),
            (core, "_process", "detokenizer and outputs"),
            (core, "stats", "statistics"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

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
    served = replace(served, model=NoModel(served.vocab_size), rows=None, layers=served.layers[:1])
    kv_bytes = bytes_per_token(served.layers) * batch * (context + steps + 64)
    core = build_engine(EngineConfig(model="nothing", max_num_seqs=batch, kv_cache_bytes=kv_bytes), served)
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
        stored = (layout.key_size, layout.stored_value_size)
        whole = [mx.random.normal((batch * blocks, heads, block_size, size)).astype(dtype) for size in stored]
        self._pool.write_blocks(order, *whole)
        sizes = (layout.key_size, layout.value_size)
        self._keys, self._values = (mx.random.normal((batch, heads, context, size)).astype(dtype) for size in sizes)
        self._queries = mx.random.normal((batch, spec.num_query_heads, layout.key_size)).astype(dtype)
        mx.eval(self._pool.arrays, self._keys, self._values, self._queries)

    def ours(self) -> float:
        start = time.perf_counter()
        mx.eval(self._pool.attend(self._queries, self._build(), scale=0.125))
        return time.perf_counter() - start

    def contiguous(self) -> float:
        start = time.perf_counter()
        queries = self._queries[:, :, None]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="+", default=[512])
    parser.add_argument("--attention", type=int, nargs="+", default=[2000], help="keys of a sequence (default 2000)")
    parser.add_argument("--host", type=int, nargs="+", default=[16, 64], help="batches (default 16 64)")
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    if min(*args.batch, *args.prefill, *args.attention, args.context, args.steps) < 1:
        parser.error("all numbers must be at least 1")
    model = args.model or str(benchmark_model(CACHE))
    served = load_model(model)
    plain, _ = load_weights(resolve_model(model))
    useful = max(args.batch) * (args.context + args.steps + 64) + max(args.prefill) + 64
    kv_bytes = bytes_per_token(served.layers) * useful
    config = EngineConfig(
        model=model,
        max_num_seqs=max(args.batch),
        # All prompts in one step: who was ready first would be at the end of its answer before the last began.
        max_num_batched_tokens=max(*args.prefill, max(args.batch) * args.context),
        max_step_ms=0,
        kv_cache_bytes=kv_bytes,
    )
    core = build_engine(config, served)
    bare, engine = Bare(plain), Engine(core)
    print(f"{model}, {served.weight_bytes / 1e6:.1f} MB of weights, {mx.default_device()}, {blas.describe()}\n")
    print(f"{'':22} {'bare ms':>9} {'ours ms':>9} {'bare tok/s':>10} {'ours tok/s':>10}   ratio (10 % to 90 %)")
    for length in args.prefill:
        prompt = make_prompts(1, length, served.vocab_size)
        bare.prefill(prompt), engine.prefill(prompt, 2)
        measured = list(pairs(partial(bare.prefill, prompt), partial(engine.prefill, prompt, 2), 8))
        print(line(f"prefill of {length}", measured, length))
    for context in args.attention:
        layer = AttentionLayer(served.kv_layers[0], config.block_size, max(args.batch), context)
        layer.ours(), layer.contiguous()
        measured = list(pairs(layer.contiguous, layer.ours, 20))
        print(line(f"attention, {max(args.batch)} x {context}", measured, max(args.batch)))
        del layer
    for batch in args.batch:
        prompts = make_prompts(batch, args.context, served.vocab_size)
        bare.prefill(prompts), engine.prefill(prompts, args.steps + 16)
        list(pairs(bare.step, engine.step, 4))
        print(line(f"decode, batch {batch}", list(pairs(bare.step, engine.step, args.steps)), batch))
    profile = Profile(core)
    batch = max(args.batch)
    prompts = make_prompts(batch, args.context, served.vocab_size)
    engine.prefill(prompts, args.steps + 16)
    profile.seconds.clear()
    step = sum(engine.step() for _ in range(args.steps)) / args.steps
    parts = profile.parts(step * args.steps, args.steps)
    print(f"\nprofile of a decode step at batch {batch}: {1e3 * step:.2f} ms")
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(share(part, seconds, step))
    print("\nCPU time of the engine's thread, with a model that computes nothing:")
    for size in args.host:
        median = statistics.median(host_times(served, size, args.context, args.steps))
        print(f"  decode, batch {size:<10} {1e3 * median:8.3f} ms")
    room = bytes_per_token(served.layers) * batch * (args.steps + 2 * ENDING_STEPS)
    delivery = delivery_seconds(replace(config, kv_cache_bytes=room), batch, args.steps)
    print(f"\ndelivery of a decode step's tokens to {batch} streams over HTTP, in shares of the step above:")
    for part, seconds in zip(("hand-over", "event loop, CPU time"), delivery, strict=True):
        print(share(part, seconds, step))
    added = sum(delivery) + sum(seconds for part, seconds in parts.items() if part not in FORWARD_PASS)
    print(share("with all above but", added, step) + f": {', '.join(FORWARD_PASS)}")


if __name__ == "__main__":
    main()
