"""Tokens per second of the engine and of mlx-lm on the same weights, and the memory of the largest prefill."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.cli.doctor.sizes import Sizes
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.files.weight_names import classes_of
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import ServedModel

TOKENS = 256
"""Prompts are of the first tokens of the vocabulary, which every model has."""
WARM_UP_TOKENS = 3


def random_prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count + length)
    return [[rng.randrange(TOKENS) for _ in range(length)] for _ in range(count)]


def decoding_rate(steps: Iterator[int], batch: int) -> float:
    """Tokens per second, from the step on in which each sequence has a token. steps: tokens of each step."""
    tokens = 0
    while tokens < batch:
        tokens += next(steps)
    start, first = time.perf_counter(), tokens
    tokens += sum(steps)
    return (tokens - first) / (time.perf_counter() - start)


def mlx_lm_rates(path: Path, sizes: Sizes) -> dict[int, float]:
    """Decoding by mlx-lm itself, by batch. The model is loaded as mlx-lm does, and freed."""
    model, _ = load_plain_model(path, get_model_classes=classes_of)
    model.eval()
    rates = {}
    for batch in sizes.batches:
        prompts = random_prompts(batch, sizes.prompt_tokens)
        for max_tokens in (WARM_UP_TOKENS, sizes.answer_tokens):
            rates[batch] = decoding_rate(mlx_lm_steps(model, prompts, max_tokens), batch)
    return rates


def mlx_lm_steps(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[int]:
    """Steps as `mlx_lm.generate` runs one prompt, and mlx-lm's server several."""
    if len(prompts) == 1:
        for _ in generate_step(mx.array(prompts[0]), model, max_tokens=max_tokens):
            yield 1
        return
    generator = BatchGenerator(model, max_tokens=max_tokens)
    generator.insert(list(prompts))
    try:
        while responses := generator.next_generated():
            yield len(responses)
    finally:
        generator.close()


def make_engine(served: ServedModel, backend: str, block_size: int, sizes: Sizes, prompt_tokens: int) -> EngineCore:
    """An engine with room for what is measured, in each of several cache groups too. prompt_tokens: of the longest
    prompt."""
    tokens = prompt_tokens + max(sizes.batches) * (sizes.prompt_tokens + sizes.answer_tokens + block_size)
    config = EngineConfig(
        speculative="off",
        kv_cache_bytes=2 * max(1, bytes_per_token(served.layers)) * tokens,
        attention_backend=backend,
        block_size=block_size,
        max_num_seqs=max(sizes.batches),
        max_num_batched_tokens=max(sizes.prefill_tokens, max(sizes.batches)),
        prefix_caching=False,
    )
    return build_engine(config, served)


def engine_rates(core: EngineCore, sizes: Sizes) -> dict[int, float]:
    """Decoding by the engine, by batch."""
    rates = {}
    for batch in sizes.batches:
        prompts = random_prompts(batch, sizes.prompt_tokens)
        for max_tokens in (WARM_UP_TOKENS, sizes.answer_tokens):
            rates[batch] = decoding_rate(engine_steps(core, prompts, max_tokens), batch)
    return rates


NUMBERS = itertools.count()


def engine_steps(core: EngineCore, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[int]:
    """Raises RuntimeError if a request fails."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        core.add(Request(f"doctor-{next(NUMBERS)}", prompt, params, core.clock()))
    while core.has_work():
        outputs = core.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        yield sum(len(output.token_ids) for output in outputs)


def prompt_rows(core: EngineCore, sizes: Sizes) -> dict[str, Any]:
    """Numbers of rows of the steps that compute a prompt while one stream decodes, and how many steps have each."""
    tokens = min(sizes.prefill_tokens, core.served.context_length - 1)
    endless = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    core.add(Request(f"doctor-{next(NUMBERS)}", [1], endless, core.clock()))
    core.step()
    once = SamplingParams(max_tokens=1, temperature=0.0)
    core.add(Request(f"doctor-{next(NUMBERS)}", [1] * tokens, once, core.clock(), timeline=True))
    chunks: tuple[int, ...] = ()
    while core.has_work() and not chunks:
        chunks = next((output.timeline.prompt_chunks for output in core.step() if output.timeline is not None), ())
    core.abort_all("measured")
    rows = Counter(1 + chunk for chunk in chunks)
    return {"prompt_tokens": tokens, "steps_by_rows": {str(count): steps for count, steps in rows.items()}}


def prefill_peak(core: EngineCore, most: int) -> dict[str, Any]:
    """Memory that the prefill of the longest prompt, of at most so many tokens, takes beside weights and pools."""
    tokens = min(most, core.served.context_length - 1)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in engine_steps(core, random_prompts(1, tokens), 1):
        pass
    return {"tokens": tokens, "bytes": mx.get_peak_memory() - before}
