"""What a step of the engine costs beside the bare forward pass of the same model, and where the rest of it goes.

    python benchmarks/engine.py [--model DIR] [--batch 1 4 16] [--context 128] [--steps 64]

Decode: a step of the engine and a step of plain mlx-lm (its own KV cache, a static batch, greedy) on the same weights,
in turn, so that whatever else the machine does falls on both. Prefill: one prompt, in turn as well. The figure to quote
is the median of the ratios; above 1 the engine is faster. The profile gives the parts of an engine's decode step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mlxpaged import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine import EngineConfig, EngineCore, Request, SamplingParams
from mlxpaged.models import DEMO_MODEL, load_model
from mlxpaged.models.loader import resolve_model

# isort: split
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_weights

PARTS = ("schedule", "metadata", "build graph", "sample", "device", "read", "update", "text", "snapshot")


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """They differ in their first token, so that the prefix cache is of no help."""
    rng = random.Random(0)
    return [[i % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))] for i in range(count)]


class Bare:
    """mlx-lm's model with mlx-lm's cache."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompts: list[list[int]]) -> float:
        """Seconds."""
        self._cache = make_prompt_cache(self._model)
        start = time.perf_counter()
        logits = self._model(mx.array(prompts), cache=self._cache)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(self._tokens, [layer.state for layer in self._cache])
        return time.perf_counter() - start

    def step(self) -> float:
        """Seconds of one token for every sequence."""
        start = time.perf_counter()
        logits = self._model(self._tokens[:, None], cache=self._cache)
        self._tokens = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(self._tokens)
        self._tokens.tolist()
        return time.perf_counter() - start


class Engine:
    """Ours, without its thread."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._count = 0

    def prefill(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds until every prompt is computed."""
        self.close()
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        for prompt in prompts:
            self._count += 1
            self.core.add(Request(f"request-{self._count}", prompt, params, time.monotonic()))
        while any(s.num_output_tokens == 0 for s in [*self.core.scheduler.running, *self.core.scheduler.waiting]):
            self.core.step()
        return time.perf_counter() - start

    def step(self) -> float:
        start = time.perf_counter()
        self.core.step()
        self.core.stats()
        return time.perf_counter() - start

    def close(self) -> None:
        self.core.abort_all("measured")
        self.core.clear_cache()


class Profile:
    """Seconds by part of the step, the parts inside a part not counted with it."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._nested: list[float] = []
        from mlxpaged.attention import AttentionMetadata
        from mlxpaged.engine.step import StepUnderWay

        self._wrap(core.scheduler, "schedule", "schedule")
        self._wrap(core.scheduler, "update", "update")
        self._wrap(core.scheduler, "get_block_tables", "schedule")
        self._wrap(AttentionMetadata, "build", "metadata")
        self._wrap(core.runner, "forward", "build graph")
        self._wrap(core.sampler, "sample", "sample")
        self._wrap(core.runner, "start_step", "device")
        self._wrap(core.runner, "finish_step", "device")
        self._wrap(StepUnderWay, "read", "read")
        self._wrap(core, "_settle", "text")
        self._wrap(core, "stats", "snapshot")

    def _wrap(self, owner: Any, name: str, part: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._nested.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self.seconds[part] += took - self._nested.pop()
                if self._nested:
                    self._nested[-1] += took

        setattr(owner, name, timed)


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
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="+", default=[512])
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    served = load_model(args.model)
    plain, _ = load_weights(resolve_model(args.model))
    config = EngineConfig(model=args.model, max_num_seqs=max(args.batch), kv_cache_bytes=4 << 30)
    core = EngineCore(config, served)
    bare, engine = Bare(plain), Engine(core)
    print(f"{args.model}, {served.weight_bytes / 1e6:.1f} MB of weights, {mx.default_device()}, {blas.describe()}\n")
    print(f"{'':22} {'bare ms':>9} {'ours ms':>9} {'bare tok/s':>10} {'ours tok/s':>10}   ratio (10 % to 90 %)")
    for length in args.prefill:
        prompt = make_prompts(1, length, served.vocab_size)
        bare.prefill(prompt), engine.prefill(prompt, 2)
        measured = list(pairs(partial(bare.prefill, prompt), partial(engine.prefill, prompt, 2), 8))
        print(line(f"prefill of {length}", measured, length))
    profile = None
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
    total = sum(engine.step() for _ in range(args.steps))
    print(f"\nprofile of a decode step at batch {batch}: {1e3 * total / args.steps:.2f} ms")
    for part, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        print(f"  {part:12} {1e3 * seconds / args.steps:8.3f} ms {100 * seconds / total:6.2f} %")
    rest = total - sum(profile.seconds.values())
    print(f"  {'other':12} {1e3 * rest / args.steps:8.3f} ms {100 * rest / total:6.2f} %")


if __name__ == "__main__":
    main()
