"""Models with a quantized KV cache: the tokens of mlx-lm's own, and when a model keeps its type."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import cache_layout
from mlxpaged.models.features import Feature
from mlxpaged.models.layers import KV, bytes_per_token, quantized
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from tests.engine.test_disk_tier import answer_twice, end, prompt_of
from tests.models.architectures import make_architecture
from tests.models.test_cache_groups import CONTEXT, MODELS, check, kv
from tests.support import cast, demo_vocab_size, make_tiny_model, poison_new_blocks, run_requests

NUM_TOKENS = 12
LENGTHS = (1, 2, 17, 31, 32, 33, 64, 90, 121)
CLEAR_MARGIN = 2e-3
"""Below this distance between the two best logits, an element that is rounded to the other neighbour may choose."""

GEMMA3 = {"num_hidden_layers": 3, "sliding_window": 16, "sliding_window_pattern": 2, "query_pre_attn_scalar": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64, "seed": 1}),
    "llama, small groups": ("llama", {"head_dim": 96, "seed": 3}),
    "qwen3": ("qwen3", {"head_dim": 64, "seed": 1}),
    "gemma3": ("gemma3_text", {"head_dim": 64, "seed": 3} | GEMMA3),
}


def quantized_caches(model: nn.Module, group: int) -> list[Any]:
    """mlx-lm's own caches, 8 bits in layers without a window."""
    return [QuantizedKVCache(group, 8) if type(cache) is KVCache else cache for cache in make_prompt_cache(model)]


class Case:
    """A model, what mlx-lm generates with quantized caches, and engines that must agree."""

    def __init__(self, path: Path) -> None:
        rng = random.Random(path.name)
        self.prompts = [[rng.randrange(1, demo_vocab_size()) for _ in range(length)] for length in LENGTHS]
        self.served = load_model(str(path), LoadOptions(kv_cache_dtype="int8"))
        assert self.served.kv_cache_dtype == "int8"
        [self.kind] = {spec.quantization for spec in self.served.kv_layers if spec.window is None}
        assert self.kind is not None
        plain, _ = load_plain_model(path)
        self.margin = float("inf")
        self.expected = [self._generate(plain, prompt, self.kind.key_group) for prompt in self.prompts]

    def _generate(self, model: nn.Module, prompt: list[int], group: int) -> list[int]:
        tokens, cache = [], quantized_caches(model, group)
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=NUM_TOKENS, prompt_cache=cache):
            best = mx.sort(logprobs.astype(mx.float32))[-2:]
            self.margin = min(self.margin, float(best[1] - best[0]))
            tokens.append(int(token))
        return tokens

    def engine(self, num_blocks: int = 256, **config: Any) -> EngineCore:
        options: dict[str, Any] = {"block_size": 32, "max_step_ms": 0, "attention_backend": "gather"} | config
        size = num_blocks * options["block_size"] * bytes_per_token(self.served.layers)
        core = build_engine(EngineConfig(kv_cache_bytes=size, **options), self.served)
        poison_new_blocks(core)
        return core

    def generate(self, core: EngineCore) -> list[list[int]]:
        return run_requests(core, self.prompts, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model_type, config = ARCHITECTURES[request.param]
    return Case(make_tiny_model(tmp_path_factory.mktemp("models") / request.param, model_type, **config))


def test_greedy_choices_of_the_reference_are_no_ties(case: Case) -> None:
    assert case.margin > CLEAR_MARGIN


def test_a_batch_gets_the_tokens_of_mlx_lm_with_kv_bits(case: Case) -> None:
    core = case.engine(max_num_seqs=9)
    assert case.generate(core) == case.expected
    assert case.generate(core) == case.expected
    assert core.stats().scheduler.prefix_hit_tokens_total > 0


def test_small_blocks_chunks_and_preemptions_get_the_tokens_of_mlx_lm_with_kv_bits(case: Case) -> None:
    swap = 100 * 8 * bytes_per_token(case.served.layers)
    windows = any(spec.window for spec in case.served.kv_layers)
    options = {"block_size": 8, "max_num_seqs": 9, "max_num_batched_tokens": 24, "swap_space_bytes": swap}
    core = case.engine(15 if windows else 20, **options)
    assert case.generate(core) == case.expected
    assert core.stats().scheduler.preemptions_total > 0


def test_the_backend_for_a_cpu_gets_the_tokens_of_mlx_lm_with_kv_bits(case: Case) -> None:
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this backend is for a CPU")
    assert case.generate(case.engine(attention_backend="cpu", max_num_seqs=9)) == case.expected


def test_a_batch_invariant_engine_gets_the_tokens_of_mlx_lm_with_kv_bits(case: Case) -> None:
    core = case.engine(batch_invariant=True, max_num_seqs=9)
    assert case.generate(core) == case.expected


def with_outliers(projection: str, size: float) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    """Biases that make one element of all keys or values by far the largest. Outputs do not depend on it: all keys have
    it, and the output projection leaves it out."""

    def weights(default: dict[str, mx.array]) -> dict[str, mx.array]:
        changed = {}
        for name, array in default.items():
            changed[name] = array * 3 if array.ndim > 1 else array
            if name.endswith(f"{projection}.bias"):
                changed[name] = array.at[::64].add(size)
            if name.endswith("o_proj.weight"):
                changed[name] = changed[name].at[:, ::64].multiply(0)
        return changed

    return weights


def load(tmp_path: Path, model_type: str, wanted: str, **config: Any) -> ServedModel:
    return load_model(
        str(make_tiny_model(tmp_path / model_type, model_type, **config)), LoadOptions(kv_cache_dtype=wanted)
    )


def test_values_of_four_bits_are_refused_if_they_move_the_logits_too_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = load(tmp_path, "qwen2", "int4", head_dim=64, hidden_size=256, weights=with_outliers("v_proj", 20.0))
    assert served.kv_cache_dtype == "int8"
    assert "the predictions of the probe change by" in served.missing[Feature.KV_CACHE_DTYPE]
    assert "the KV cache is not int4 but int8" in caplog.text
    assert {spec.quantization.value_bits for spec in served.kv_layers if spec.quantization} == {8}


def test_values_of_four_bits_are_served_if_the_logits_stay_close(tmp_path: Path) -> None:
    served = load(tmp_path, "qwen3", "int4", head_dim=128)
    assert (served.kv_cache_dtype, served.missing[Feature.KV_CACHE_DTYPE]) == ("int4", "")
    assert str(served.kv_layers[0].quantization) == "int8 keys in groups of 128, int4 values in groups of 64"


def test_a_model_whose_rounding_moves_the_logits_as_far_gets_four_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpaged.models.checks.quantized_kv.MOST_DIVERGENCE", 0.0)
    path = make_tiny_model(tmp_path / "qwen3", "qwen3", head_dim=128)
    assert load_model(str(path), LoadOptions(kv_cache_dtype="int4")).kv_cache_dtype == "auto"
    monkeypatch.setattr("mlxpaged.models.checks.reference.measure_rounding", lambda *_: 0.1)
    assert load_model(str(path), LoadOptions(kv_cache_dtype="int4")).kv_cache_dtype == "int4"


def test_keys_with_an_outlier_keep_the_type_of_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = load(tmp_path, "qwen2", "int4", head_dim=64, hidden_size=256, weights=with_outliers("k_proj", 1000.0))
    assert served.kv_cache_dtype == "auto"
    assert caplog.text.count("the predictions of the probe change by") == 2
    assert not any(spec.quantization for spec in served.kv_layers)


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("llama", {"head_dim": 80}, "no group divides heads of 80"),
        ("deepseek_v3", {}, "all layers have a window or latents"),
        ("qwen3_next", {}, "no group divides heads of 16"),
    ],
)
def test_layers_that_cannot_be_quantized_keep_their_type(
    model_type: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    served = load_model(
        str(make_architecture(tmp_path / "model", model_type, **config)), LoadOptions(kv_cache_dtype="int8")
    )
    assert (served.kv_cache_dtype, served.missing[Feature.KV_CACHE_DTYPE]) == ("auto", reason)


def test_the_type_of_the_model_is_the_default(tmp_path: Path) -> None:
    served = load_model(str(make_tiny_model(tmp_path / "llama", "llama", head_dim=64)))
    assert (served.kv_cache_dtype, served.missing[Feature.KV_CACHE_DTYPE]) == ("auto", "")
    assert not any(spec.quantization for spec in served.kv_layers)


def test_stored_prefixes_are_found_again_and_are_not_those_of_another_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillLimits, "seconds_roughly", lambda _, start, tokens: tokens / 1000)
    path = make_tiny_model(tmp_path / "llama", "llama", head_dim=64)
    models = [load_model(str(path), LoadOptions(kv_cache_dtype=dtype)) for dtype in ("int8", "int8", "auto")]
    prompt, hits, tokens = prompt_of(0), [], []
    for served in models:
        size = 100 * 32 * bytes_per_token(served.layers)
        core = build_engine(EngineConfig(kv_cache_bytes=size, prefix_cache_dir=tmp_path / "prefixes"), served)
        tokens.append(answer_twice(core, prompt))
        end(core)
        hits.append(core.stats().scheduler.prefix_hit_tokens_total)
    assert tokens[0] == tokens[1]
    assert hits == [199, 192 + 199, 199], "a disk has whole blocks"


def test_the_pool_has_more_blocks_in_the_same_memory(tmp_path: Path) -> None:
    path = cast(make_tiny_model(tmp_path / "llama", "llama", head_dim=128), mx.float16)
    blocks = {}
    for dtype in ("auto", "int8"):
        served = load_model(str(path), LoadOptions(kv_cache_dtype=dtype))
        core = build_engine(EngineConfig(kv_cache_bytes=4_000_000), served)
        blocks[dtype] = core.scheduler.config.num_blocks
        assert core.runner.bytes_of(blocks[dtype]) <= 4_000_000
    assert blocks["int8"] >= 1.85 * blocks["auto"]


@pytest.mark.parametrize(
    ("dtype", "size", "least"), [("int8", 64, 1.85), ("int8", 128, 1.85), ("int4", 128, 2.5), ("int4", 256, 2.5)]
)
def test_the_same_memory_has_so_many_times_as_many_blocks(dtype: str, size: int, least: float) -> None:
    """Of a model in 16 bits."""
    layers = [kv(8, size)] * 32
    ratio = bytes_per_token(layers) / bytes_per_token(quantized(layers, dtype))
    assert least <= ratio < least + 0.1


SMALLER = {"gemma-3-4b": 0.7, "gemma-3-12b": 0.6, "gemma-3-27b": 0.6, "gpt-oss-20b": 0.6}
"""Models whose layers without a window have as many heads as those with one: the share of the memory that their blocks
take for a token of a long context."""


@pytest.mark.parametrize("name", MODELS)
def test_quantized_layers_share_blocks_with_layers_that_have_a_window(name: str) -> None:
    layers, _, _ = MODELS[name]
    plain, layout = cache_layout(layers, CONTEXT), cache_layout(kv_specs(layers), CONTEXT)
    if len(plain.windows) == 1 or len(layout.windows) == 1:
        assert name not in SMALLER
        return
    check(kv_specs(layers), layout)
    share = layout.windows.count(None) * layout.bytes_per_token / (plain.windows.count(None) * plain.bytes_per_token)
    assert share <= SMALLER.get(name, 1.0)


def kv_specs(layers: list[KV]) -> list[KV]:
    return [spec for spec in quantized(layers, "int8") if isinstance(spec, KV)]
