"""What a quantized KV cache does to a model's predictions: perplexity, and greedy tokens.

    python benchmarks/quantized_kv.py [--model demo random] [--tokens 2000]

The demo model is asked its own tasks, with keys that training never saw, in conversations of many turns; the tokens of
the right answers count. The random model has heads of 128 and continues its own text, sampled at temperature 1 with an
unquantized cache. Every text is computed with each type of cache, from the same tokens. Agreement: the share of
positions at which the most likely token is the one of the unquantized cache. Difference and divergence: of the logits
and predictions of the probe, by which a type is refused at load (mlxpaged/models/checks/quantized_kv.py).
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from comparison.model import write_model
from engine_models import SHARED, make_weights

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import KV_CACHE_DTYPES, EngineConfig
from mlxpaged.models.checks.quantized_kv import effect_on_logits
from mlxpaged.models.checks.reference import make_reference
from mlxpaged.models.layers import bytes_per_token, quantized
from mlxpaged.models.loader import ServedModel, load_model

CONTEXT = 1500
"""Most tokens of a conversation."""

OWN_TEXTS = 4
"""Texts of the random model, sampled in one batch."""

RANDOM: dict[str, Any] = SHARED | {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
SHARPNESS, OF_HEAD = 3, 12
"""Factors on the weights: with mlx-lm's initial ones, all tokens are almost equally likely."""


class Text(NamedTuple):
    """counted: positions whose tokens are predicted."""

    tokens: list[int]
    counted: list[int]


def sharp_weights(config: dict[str, Any], num_fixed: int, seed: int) -> dict[str, Any]:
    weights = make_weights(config, num_fixed, seed)
    factors = {name: OF_HEAD if "lm_head" in name else SHARPNESS for name in weights}
    return {name: array * factors[name] if array.ndim > 1 else array for name, array in weights.items()}


def conversations(served: ServedModel, wanted: int) -> Iterator[Text]:
    """Until so many tokens of answers are in them."""
    from demo_model import tasks

    rng, template = random.Random(0), served.tokenizer.apply_chat_template
    cases = [case for task in tasks.TASKS for case in tasks.held_out(task, max(8, wanted // 20), 1)]
    rng.shuffle(cases)
    while wanted > 0:
        messages: list[dict[str, str]] = []
        counted: list[int] = []
        while cases:
            case = cases.pop()
            asked = [*messages, *case.messages]
            start = len(template(asked))
            if messages and start > CONTEXT:
                break
            messages = [*asked, {"role": "assistant", "content": case.answer}]
            counted += range(start, len(template(messages, False)))
        yield Text(template(messages, False), counted)
        wanted -= len(counted)


def run(core: EngineCore, prompts: list[list[int]], **options: Any) -> dict[str, list[RequestOutput]]:
    """The outputs of all prompts, by their numbers."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        core.add(Request(name, prompt, SamplingParams(ignore_eos=True, **options), 0.0))
    while core.has_work():
        for output in core.step():
            outputs[output.request_id].append(output)
    return outputs


def own_texts(core: EngineCore, wanted: int) -> Iterator[Text]:
    """What the model says after random tokens."""
    rng = random.Random(0)
    prompts = [rng.choices(range(5, core.served.vocab_size), k=16) for _ in range(OWN_TEXTS)]
    answers = run(core, prompts, max_tokens=wanted // OWN_TEXTS, temperature=1.0, seed=0)
    for prompt, outputs in zip(prompts, answers.values(), strict=True):
        text = prompt + [token for output in outputs for token in output.token_ids]
        yield Text(text, list(range(len(prompt), len(text))))


def predictions(core: EngineCore, text: Text) -> tuple[list[float], list[int]]:
    """Log-probabilities of the counted tokens, and the most likely tokens at their positions."""
    [outputs] = run(core, [text.tokens], max_tokens=1, temperature=0.0, prompt_logprobs=1).values()
    found = next(output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
    at = np.array(text.counted) - 1
    return found.logprobs[at].tolist(), found.top_ids[at, 0].tolist()


def measure(name: str, path: str, tokens: int) -> None:
    served = load_model(path)
    reference = make_reference(served.model, served.context_length)
    texts: list[Text] = []
    greedy: list[int] = []
    for dtype in KV_CACHE_DTYPES:
        layers = served.layers if dtype == "auto" else quantized(served.layers, dtype)
        size = 2 * (CONTEXT + tokens) * bytes_per_token(layers)
        config = EngineConfig(kv_cache_bytes=size, max_step_ms=0, prefix_caching=False)
        core = build_engine(config, replace(served, layers=layers))
        texts = texts or list(conversations(served, tokens) if name == "demo" else own_texts(core, tokens))
        logprobs: list[float] = []
        most_likely: list[int] = []
        for text in texts:
            of_text, best = predictions(core, text)
            logprobs += of_text
            most_likely += best
        greedy = greedy or most_likely
        agreement = float(np.mean([a == b for a, b in zip(most_likely, greedy, strict=True)]))
        perplexity = math.exp(-float(np.mean(logprobs)))
        effect = effect_on_logits(served.model, layers, reference)
        print(
            f"{name:8} {dtype:6} {bytes_per_token(layers):9} {len(logprobs):8} {perplexity:12.4f} {agreement:11.2%} "
            f"{effect.difference:12.2%} {effect.divergence:12.4f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=("demo", "random"), default=["demo", "random"])
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    print(
        f"{'model':8} {'type':6} {'KV bytes':>9} {'tokens':>8} {'perplexity':>12} {'agreement':>11} {'difference':>12} "
        f"{'divergence':>12}"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in args.model:
            path = name if name == "demo" else str(write_model(Path(directory), RANDOM, sharp_weights))
            measure(name, path, args.tokens)


if __name__ == "__main__":
    main()
