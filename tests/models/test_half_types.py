"""Models of every kind in float16 and bfloat16: as near to what their weights say as mlx-lm's own answers are."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.logprobs import TokenLogprobs
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import is_per_sequence
from mlxpaged.models.loader import load_model
from tests.models.architectures import VOCAB_SIZE, make_architecture
from tests.support import cast, poison_new_blocks

CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).rpartition('.')[2]}", marks=marks)
    for name in ("lfm2", "qwen3_5", "gemma4", "deepseek_v3", "phi", "stablelm")
    for dtype in (mx.float16, mx.bfloat16)
    for marks in [() if name in ("lfm2", "phi") and dtype == mx.bfloat16 else pytest.mark.models]
]

NO_EXPERTS = {"deepseek_v3": {"first_k_dense_replace": 3}}
"""On a CPU, MLX multiplies by experts in float32 only."""

CLEAR = 5.0
"""Two log-probabilities further apart than this many mean errors do not change places."""

LENGTHS = (1, 9, 35, 64)
NUM_TOKENS, TOP = 10, 10


def logprobs(logits: mx.array) -> npt.NDArray[np.float32]:
    logits = logits[..., :VOCAB_SIZE].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def generate(path: Path, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
    """The engine's greedy answers, with chunks and decoding tokens in the same steps."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 29, "max_step_ms": 0}
    config = EngineConfig(str(path), kv_cache_bytes=2_000_000, block_size=8, **limits)
    served = load_model(str(path))
    assert not is_per_sequence(served.layers), "all run as one batch"
    core = build_engine(config, served)
    poison_new_blocks(core)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP)
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), prompt, params, time.monotonic()))
    answers: dict[str, list[TokenLogprobs]] = {str(i): [] for i in range(len(prompts))}
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.logprobs
    return list(answers.values())


def rms(errors: list[npt.NDArray[np.float32]]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_half_types_are_as_exact_as_mlx_lm_and_agree_on_clear_choices(
    name: str, dtype: mx.Dtype, tmp_path: Path
) -> None:
    """Errors are those of log-probabilities against the same weights in float32."""
    path = cast(make_architecture(tmp_path / "model", name, **NO_EXPERTS.get(name, {})), dtype)
    rng = random.Random(name)
    prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    plain: Any = load_plain_model(path)[0]
    exact_model: Any = load_plain_model(path)[0]
    exact_model.set_dtype(mx.float32)
    errors, plain_errors, choices = [], [], []
    for prompt, answer in zip(prompts, generate(path, prompts), strict=True):
        tokens = [entry.token_id for entry in answer]
        exact = logprobs(exact_model(mx.array([prompt + tokens[:-1]]), cache=make_prompt_cache(exact_model))[0])
        cache = make_prompt_cache(plain)
        rows = [plain(mx.array([part]), cache=cache)[0, -1] for part in (prompt, *([token] for token in tokens[:-1]))]
        for entry, right, own in zip(answer, exact[len(prompt) - 1 :], logprobs(mx.stack(rows)), strict=True):
            ids = [token for token, _ in entry.top]
            errors.append(np.array([logprob for _, logprob in entry.top]) - right[ids])
            plain_errors.append(own[ids] - right[ids])
            second, best = np.sort(right)[-2:]
            choices.append((best - second, entry.token_id == int(np.argmax(right))))
    assert rms(errors) < 1.5 * rms(plain_errors)
    clear = [agrees for margin, agrees in choices if margin > CLEAR * rms(plain_errors)]
    assert all(clear)
    assert len(clear) > len(choices) // 4
