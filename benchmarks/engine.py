"""Tokens per second of the engine at several batch sizes, beside mlx-lm's own generation of the prompts one by one.

    python benchmarks/engine.py [--model demo] [--batch 1 4 16] [--prompt-tokens 128] [--new-tokens 64]

Both run in this process, in turn, on the same weights; the figure to quote is the ratio. Prompts are random tokens and
differ in their first one, so that the prefix cache is of no help.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from mlxpaged import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine import EngineConfig, EngineCore, Request, SamplingParams
from mlxpaged.models import DEMO_MODEL, load_model
from mlxpaged.models.loader import resolve_model

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as load_weights


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[i % vocab_size, *(rng.randrange(vocab_size) for _ in range(length - 1))] for i in range(count)]


def time_engine(core: EngineCore, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds for all prompts, submitted together."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(Request(f"request-{i}", prompt, params, start))
    while core.has_work():
        core.step()
    seconds = time.perf_counter() - start
    if core.scheduler.prefix_cache is not None:
        core.scheduler.prefix_cache.clear()
    return seconds


def time_mlx_lm(model: object, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds for all prompts, one after another."""
    start = time.perf_counter()
    for prompt in prompts:
        for _ in generate_step(mx.array(prompt), model, max_tokens=new_tokens):
            pass
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    served = load_model(args.model)
    plain, _ = load_weights(resolve_model(args.model))
    core = EngineCore(EngineConfig(model=args.model, max_num_seqs=max(args.batch)), served)
    print(
        f"{args.model}, {served.weight_bytes / 1e6:.1f} MB of weights, {mx.default_device()}, BLAS: {blas.describe()}"
    )
    print(f"{args.prompt_tokens} prompt and {args.new_tokens} new tokens per request; median of {args.runs} runs\n")
    print("batch  mlxpaged tok/s  mlx-lm one by one tok/s  ratio (min to max)")
    for batch in args.batch:
        prompts = make_prompts(batch, args.prompt_tokens, served.vocab_size)
        time_engine(core, prompts, 4), time_mlx_lm(plain, prompts, 4)
        pairs = [
            (time_engine(core, prompts, args.new_tokens), time_mlx_lm(plain, prompts, args.new_tokens))
            for _ in range(args.runs)
        ]
        tokens = batch * args.new_tokens
        ours, theirs = (tokens / statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in pairs)
        middle = statistics.median(ratios)
        print(f"{batch:5}  {ours:14.1f}  {theirs:23.1f}  {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
