"""Token for token what mlx-lm's own generation gives, for many architectures and every way through the engine."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.cpu.split_linear import SplitLinear
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import bytes_per_token
from mlxpaged.models.loader import load_model
from tests.support import cast, demo_vocab_size, make_tiny_model, poison_new_blocks, quantize, run_requests

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="CPU streams are for a CPU")

NUM_TOKENS = 8
CLEAR_MARGIN = 1e-4
"""Below this distance between the two best logits, float32 rounding alone may choose either."""

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"seed": 1},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma": {},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 40, "attention_bias": False, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "granite": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.2,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "stablelm": {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "use_qkv_bias": False},
    "starcoder2": {"norm_epsilon": 1e-5},
    "cohere": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "attention_bias": False,
        "layer_norm_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "attention_bias": False,
        "layer_norm_bias": False,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5},
}

SAMPLE = ("llama", "granite", "cohere2", "gpt2")
"""Run by default, the others with `make test-models`. More run by default in test_architectures.py."""

LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 121, 150)


class Case:
    """One model, what mlx-lm generates with it for every prompt, and engines that must agree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        rng = random.Random(path.name)
        self.prompts = [[rng.randrange(1, demo_vocab_size()) for _ in range(length)] for length in LENGTHS]
        plain, _ = load_plain_model(path)
        plain.eval()
        self.margin = float("inf")
        self.expected = [self._generate(plain, prompt) for prompt in self.prompts]
        self.served = load_model(str(path))

    def _generate(self, model: nn.Module, prompt: list[int]) -> list[int]:
        tokens = []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS):
            best = mx.sort(logprobs.astype(mx.float32))[-2:]
            self.margin = min(self.margin, float(best[1] - best[0]))
            tokens.append(int(token))
        return tokens

    def engine(self, num_blocks: int = 256, block_size: int = 32, **config: Any) -> EngineCore:
        size = num_blocks * block_size * bytes_per_token(self.served.layers)
        options = {"block_size": block_size, "max_step_ms": 0} | config
        core = build_engine(EngineConfig(str(self.path), kv_cache_bytes=size, **options), self.served)
        assert core.scheduler.blocks.size.limit == num_blocks * len(core.scheduler.blocks.groups)
        poison_new_blocks(core)
        return core

    def generate(self, core: EngineCore, which: slice) -> list[list[int]]:
        return run_requests(core, self.prompts[which], max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SAMPLE else pytest.mark.models) for name in ARCHITECTURES],
)
def case(request: pytest.FixtureRequest, directory: Path) -> Case:
    name: str = request.param
    return Case(make_tiny_model(directory / name, name, **ARCHITECTURES[name]))


def assert_same_everywhere(case: Case) -> None:
    """Every way through the engine at once, for models that are variants of one covered in full below."""
    everything = slice(None)
    for which in (slice(0, 1), slice(15, 16)):
        assert case.generate(case.engine(), which) == case.expected[which]
    core = case.engine(max_num_seqs=16, max_num_batched_tokens=24)
    assert case.generate(core, everything) == case.expected
    assert case.generate(core, everything) == case.expected
    assert core.stats().scheduler.prefix_hit_tokens_total > 0


def test_greedy_choices_of_the_reference_are_no_ties(case: Case) -> None:
    assert case.margin > CLEAR_MARGIN


def test_alone_every_prompt_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(prefix_caching=False)
    for i in (0, 4, 7, 10, 15):
        assert case.generate(core, slice(i, i + 1)) == case.expected[i : i + 1]


def test_sixteen_mixed_lengths_in_one_batch_get_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(max_num_seqs=16)
    assert case.generate(core, slice(None)) == case.expected
    assert core.stats().steps_total < 2 * NUM_TOKENS


def test_chunked_prefill_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(max_num_seqs=16, max_num_batched_tokens=24, prefix_caching=False)
    assert case.generate(core, slice(None)) == case.expected
    assert core.stats().steps_total > sum(LENGTHS) // 24


def test_small_blocks_get_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(num_blocks=200, block_size=8, max_num_seqs=16, max_num_batched_tokens=57)
    assert case.generate(core, slice(None)) == case.expected


def test_a_prefix_hit_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(max_num_seqs=16)
    assert case.generate(core, slice(8, None)) == case.expected[8:]
    hits_before = core.stats().scheduler.prefix_hit_tokens_total
    assert case.generate(core, slice(8, None)) == case.expected[8:]
    size = 1 if core.scheduler.blocks.states.can_fork else 32  # states go on after whole blocks
    expected_hits = sum((length - 1) // size * size for length in LENGTHS[8:])
    assert core.stats().scheduler.prefix_hit_tokens_total - hits_before == expected_hits > 0


def test_a_preempted_sequence_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    core = case.engine(num_blocks=20, block_size=8, max_num_seqs=16)
    assert case.generate(core, slice(None)) == case.expected
    assert core.stats().scheduler.preemptions_total > 0


@on_cpu
@pytest.mark.usefixtures("many_streams")
def test_on_several_streams_every_prompt_gets_the_tokens_of_mlx_lm(case: Case) -> None:
    assert_same_on_streams(case)


def assert_same_on_streams(case: Case) -> None:
    """Products, networks, attention: all that can be shared out among cores."""
    split = copy.copy(case)
    split.served = load_model(str(case.path))
    model: Any = split.served.model
    assert any(isinstance(module, SplitLinear) for module in model.modules())
    core = split.engine(max_num_seqs=16, max_num_batched_tokens=100)
    assert split.generate(core, slice(None)) == case.expected


VARIANTS: dict[str, Callable[[Path], Path]] = {
    "4-bit": lambda path: quantize(make_tiny_model(path, "llama"), 4),
    "8-bit": lambda path: quantize(make_tiny_model(path, "llama", seed=1), 8),
    "4-bit tied": lambda path: quantize(make_tiny_model(path, "llama", seed=2, tie_word_embeddings=True), 4),
    "tied embeddings": lambda path: make_tiny_model(path, "llama", tie_word_embeddings=True),
    "multi-query": lambda path: make_tiny_model(path, "llama", num_key_value_heads=1),
    "as many kv heads": lambda path: make_tiny_model(path, "llama", num_key_value_heads=4),
    "head size not hidden / heads": lambda path: make_tiny_model(path, "qwen3", head_dim=32),
    "head size 80": lambda path: make_tiny_model(path, "llama", head_dim=80),
    "sliding layers among full ones": lambda path: make_tiny_model(
        path, "llama", seed=3, layer_types=["full_attention", "sliding_attention"], sliding_window=20
    ),
    "queries scaled by their position": lambda path: make_tiny_model(
        path,
        "ministral3",
        seed=3,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=20,
        rope_parameters={
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
            "rope_type": "default",
            "type": "default",
        },
    ),
    "window of one token": lambda path: make_tiny_model(
        path, "gpt_oss", **(ARCHITECTURES["gpt_oss"] | {"sliding_window": 1})
    ),
    "window of one block": lambda path: make_tiny_model(
        path, "gpt_oss", **(ARCHITECTURES["gpt_oss"] | {"sliding_window": 32})
    ),
    "window longer than the context": lambda path: make_tiny_model(
        path, "gpt_oss", **(ARCHITECTURES["gpt_oss"] | {"sliding_window": 512})
    ),
}


COVERED = ("8-bit", "tied embeddings", "as many kv heads")
"""Each is a part of another variant or architecture that runs by default: these run with `make test-models`."""


def variants(*parts: str) -> list[Any]:
    """Those with one of the parts in their names."""
    found = [name for name in VARIANTS if any(part in name for part in parts)]
    return [pytest.param(name, marks=pytest.mark.models if name in COVERED else ()) for name in found]


@pytest.fixture(scope="module")
def variant(directory: Path) -> Callable[[str], Case]:
    return functools.cache(lambda name: Case(VARIANTS[name](directory / name.replace(" / ", " by "))))


@pytest.mark.parametrize("name", variants(""))
def test_a_variant_gets_the_tokens_of_mlx_lm_in_every_way(name: str, variant: Callable[[str], Case]) -> None:
    case = variant(name)
    assert case.margin > CLEAR_MARGIN
    assert_same_everywhere(case)


@on_cpu
@pytest.mark.usefixtures("many_streams")
@pytest.mark.parametrize("name", variants("bit", "tied"))
def test_on_several_streams_a_variant_gets_the_tokens_of_mlx_lm(name: str, variant: Callable[[str], Case]) -> None:
    assert_same_on_streams(variant(name))


@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float16, 0.02), (mx.bfloat16, 0.15)], ids=str)
def test_half_types_stay_close_to_mlx_lm_and_agree_on_clear_choices(
    dtype: mx.Dtype, tolerance: float, directory: Path
) -> None:
    """tolerance: in logits, whose spread over the vocabulary is about 1 to 10; the first choice must agree wherever
    the reference prefers it by more than twice that."""
    path = cast(make_tiny_model(directory / str(dtype), "llama"), dtype)
    case = Case(path)
    assert {spec.dtype for spec in case.served.layers} == {dtype}
    core = case.engine(max_num_seqs=16)
    plain, _ = load_plain_model(path)
    seen: list[mx.array] = []
    forward = core.runner.forward

    def keeping_forward(*args: Any) -> mx.array:
        seen.append(forward(*args))
        return seen[-1]

    case.generate(core, slice(None))  # the pool grows until it has room for all of them
    core.clear_cache()
    core.runner.forward = keeping_forward  # type: ignore[method-assign]
    got = case.generate(core, slice(None))
    assert len(seen[0]) == len(LENGTHS)
    clear = 0
    for i, prompt in enumerate(case.prompts):
        reference = plain(mx.array([prompt]))[0, -1].astype(mx.float32)
        assert float(mx.abs(seen[0][i].astype(mx.float32) - reference).max()) < tolerance
        best = mx.sort(reference)[-2:]
        if float(best[1] - best[0]) > 2 * tolerance:
            clear += 1
            assert got[i][0] == case.expected[i][0]
    assert clear >= len(LENGTHS) // 2
