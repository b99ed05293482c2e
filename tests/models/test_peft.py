"""Adapters of PEFT: they answer as their model with the adapter merged into its weights by hand, or are refused."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters import peft
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.adapters.adapters import MAX_HEADER_BYTES
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from tests.answers import greedy_answer
from tests.engine.hybrid import request, run
from tests.models.architectures import make_architecture
from tests.models.gguf_models import as_gguf
from tests.models.peft_files import ALPHA, CONFIG, WEIGHTS, PeftAdapter, make_peft_adapter, merged
from tests.models.test_hostile import SECONDS, change_header, write, write_bytes
from tests.support import cast, make_adapter, poison_new_blocks, quantize

NUM_TOKENS = 8
EVERYWHERE = {"": ALPHA / 4}
"""The scale of the adapters that `make_peft_adapter` saves by default."""
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_architecture(tmp_path_factory.mktemp("peft") / "qwen3", "qwen3", tie_word_embeddings=False)


def served_with(model: Path, *adapters: PeftAdapter) -> ServedModel:
    wanted = [AdapterPath(f"a{i}", adapter.path) for i, adapter in enumerate(adapters)]
    return load_model(str(model), LoadOptions(adapters=wanted))


def answers(model: Path, served: ServedModel, prompt: list[int], adapters: list[str | None]) -> list[list[int]]:
    """Of the same prompt, in the same steps."""
    config = EngineConfig(str(model), kv_cache_bytes=2**22, attention_backend="gather", max_step_ms=0)
    core = build_engine(config, served)
    poison_new_blocks(core)
    result = run(core, [request(str(i), prompt, NUM_TOKENS, adapter=name) for i, name in enumerate(adapters)])
    return [result.tokens(str(i)) for i in range(len(adapters))]


def assert_as_merged(model: Path, adapter: PeftAdapter, scales: Mapping[str, float] = EVERYWHERE) -> None:
    """Also in a step with rows of the model itself, which answers otherwise."""
    rng = random.Random(3)
    prompt = [rng.randrange(16, 250) for _ in range(20)]
    whole = merged(model, adapter, scales)
    expected = greedy_answer(whole, make_prompt_cache(whole), prompt, NUM_TOKENS)
    plain, adapted = answers(model, served_with(model, adapter), prompt, [None, "a0"])
    assert expected.equals(adapted)
    assert plain != adapted


FORMS: dict[str, tuple[dict[str, Any], Mapping[str, float]]] = {
    "alpha / r": ({}, EVERYWHERE),
    "alpha / sqrt(r)": ({"use_rslora": True}, {"": ALPHA / 2}),
    "every linear layer": (
        {"modules": ("_proj", "lm_head"), "target_modules": "all-linear"},
        EVERYWHERE,
    ),
    "one layer": ({"modules": ("1.mlp.up_proj",), "r": 1, "lora_alpha": 1.5}, {"": 1.5}),
    "ranks of modules": (
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 3}, "ranks": {"q_proj": 2, "1.mlp.down_proj": 3}},
        {"q_proj": ALPHA / 2, "1.mlp.down_proj": ALPHA / 3, "": ALPHA / 4},
    ),
    "ranks under the root": (
        {"rank_pattern": {".*self_attn.q_proj": 9}, "ranks": {"q_proj": 9}, "use_rslora": True},
        {"q_proj": ALPHA / 3, "": ALPHA / 2},
    ),
    "alphas of modules, the first that matches": (
        {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 4, "(q|v)_proj": 20, "self_attn.v_proj": 1}},
        {"0.self_attn.q_proj": 1, "q_proj": 5, "v_proj": 5, "": ALPHA / 4},
    ),
    "an end that is not a whole name": ({"alpha_pattern": {"_proj": 400, "proj": 400}}, EVERYWHERE),
    "alphas and ranks": (
        {
            "alpha_pattern": {"q_proj": 6},
            "rank_pattern": {"q_proj": 2, "v_proj": 2},
            "ranks": {"q_proj": 2, "v_proj": 2},
        },
        {"q_proj": 3, "v_proj": ALPHA / 2, "": ALPHA / 4},
    ),
    "names with the adapter's": ({"suffix": ".default.weight"}, EVERYWHERE),
    "names without a prefix": ({"prefix": ""}, EVERYWHERE),
    "an output head that is saved too": ({"modules": ("q_proj", "lm_head"), "frozen": "lm_head"}, EVERYWHERE),
    "names of a model that sees": ({"rename": ("model.", "model.language_model.")}, EVERYWHERE),
    "bfloat16": ({"dtype": mx.bfloat16}, EVERYWHERE),
    "a start that leaves the model": ({"init_lora_weights": "gaussian", "lora_dropout": 0.5}, EVERYWHERE),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_answers_as_its_model_with_it_merged(model: Path, tmp_path: Path, form: str) -> None:
    fields, scales = FORMS[form]
    assert_as_merged(model, make_peft_adapter(model, tmp_path / "adapter", **fields), scales)


def test_its_logits_are_those_of_the_merged_model(model: Path, tmp_path: Path) -> None:
    adapter = make_peft_adapter(model, tmp_path / "adapter")
    plain, _ = load_plain_model(model)
    peft.attach(plain, adapter.path, MAX_HEADER_BYTES)
    tokens = mx.array([[20, 30, 40, 50, 60]])
    expected = merged(model, adapter, EVERYWHERE)(tokens)
    np.testing.assert_allclose(np.array(plain(tokens)), np.array(expected), atol=2e-4)
    assert served_with(model, adapter).adapters.nbytes == sum(a.nbytes + b.nbytes for a, b in adapter.matrices.values())


def test_adapters_of_quantized_half_precision_and_biased_layers_are_right(tmp_path: Path) -> None:
    quantized = quantize(make_architecture(tmp_path / "quantized", "qwen3"), 4)
    assert_as_merged(quantized, make_peft_adapter(quantized, tmp_path / "a"))
    biased = make_architecture(tmp_path / "biased", "qwen2")
    assert_as_merged(biased, make_peft_adapter(biased, tmp_path / "b"))


def test_an_adapter_for_a_model_in_half_precision_is_served(tmp_path: Path) -> None:
    """Its batches are compared with itself when it loads."""
    model = cast(make_architecture(tmp_path / "m", "qwen3"), mx.bfloat16)
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        served_with(model, make_peft_adapter(model, tmp_path / str(dtype), dtype=dtype))


@pytest.mark.parametrize("outer", ["model.language_model.", "language_model.model."])
def test_paths_of_either_version_of_transformers_are_found_in_a_model_with_parts(tmp_path: Path, outer: str) -> None:
    model = make_architecture(tmp_path / "m", "qwen3_5")
    rename = ("language_model.model.", outer)
    assert_as_merged(model, make_peft_adapter(model, tmp_path / "adapter", rename=rename))


def test_it_fits_a_gguf_file_of_its_model(tmp_path: Path) -> None:
    """The rows of Llama's queries and keys stand in another order in such a file."""
    directory = make_architecture(tmp_path / "mlx", "llama", layer_types=None, sliding_window=None)
    adapter = make_peft_adapter(directory, tmp_path / "adapter", modules=("q_proj", "k_proj", "down_proj"))
    path, whole = as_gguf(directory, tmp_path / "model.gguf"), merged(directory, adapter, EVERYWHERE)
    prompt = list(range(20, 40))
    expected = greedy_answer(whole, make_prompt_cache(whole), prompt, NUM_TOKENS)
    plain, adapted = answers(path, served_with(path, adapter), prompt, [None, "a0"])
    assert expected.equals(adapted)
    assert plain != adapted


def test_it_is_served_beside_an_adapter_of_mlx_lm(model: Path, tmp_path: Path) -> None:
    adapter = make_peft_adapter(model, tmp_path / "peft")
    own = make_adapter(model, tmp_path / "own", 1)
    prompt = list(range(20, 40))
    alone = answers(model, served_with(model, adapter), prompt, ["a0"])
    served = load_model(str(model), LoadOptions(adapters=[AdapterPath("a0", adapter.path), AdapterPath("a1", own)]))
    together = answers(model, served, prompt, ["a0", "a1", None])
    assert together[:1] == alone
    assert len({tuple(tokens) for tokens in together}) == 3


# -- what is refused ---------------------------------------------------------------------------------------------------


def change(**fields: Any) -> Damage:
    def damage(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text())
        (directory / CONFIG).write_text(json.dumps(config | fields))

    return damage


def tensors(change: Callable[[dict[str, mx.array]], object]) -> Damage:
    """change: of the tensors, by their names, in place."""

    def damage(directory: Path) -> None:
        found: Any = mx.load(str(directory / WEIGHTS))
        change(found)
        mx.eval(found)
        mx.save_safetensors(str(directory / WEIGHTS), found)

    return damage


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def added(name: str, *shape: int, dtype: mx.Dtype = mx.float32) -> Damage:
    return tensors(lambda found: found.update({name: mx.zeros(shape or (4, 4), dtype)}))


def renamed(old: str, new: str) -> Damage:
    def rename(found: dict[str, mx.array]) -> None:
        for name in list(found):
            found[name.replace(old, new)] = found.pop(name)

    return tensors(rename)


def drop(directory: Path) -> None:
    (directory / WEIGHTS).unlink()


def pickled(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")


EMPTY = {"A": (0, 64), "B": (64, 0)}
REFUSED: dict[str, tuple[Damage, str]] = {
    "another type": (
        change(peft_type="IA3"),
        "its peft_type is 'IA3', and only 'LORA' is supported: merge the adapter",
    ),
    "no type": (change(peft_type=None), "its peft_type is None"),
    "modules_to_save": (change(modules_to_save=["lm_head"]), "sets modules_to_save, which is not supported: merge"),
    "use_dora": (change(use_dora=True), "sets use_dora"),
    "lora_bias": (change(lora_bias=True), "sets lora_bias"),
    "fan_in_fan_out": (change(fan_in_fan_out=True), "sets fan_in_fan_out"),
    "layer_replication": (change(layer_replication=[[0, 4]]), "sets layer_replication"),
    "target_parameters": (change(target_parameters=["mlp.experts.up_proj"]), "sets target_parameters"),
    "tokens": (change(trainable_token_indices=[1]), "sets trainable_token_indices"),
    "activated LoRA": (change(alora_invocation_tokens=[1]), "sets alora_invocation_tokens"),
    "two fields": (change(use_dora=True, lora_bias=True), "sets lora_bias, use_dora"),
    "PiSSA": (change(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'.*path_initial_model"),
    "a start of a list": (change(init_lora_weights=["pissa"]), "init_lora_weights is"),
    "embeddings": (added("base_model.model.model.embed_tokens.lora_embedding_A"), "names embeddings: only pairs"),
    "magnitudes": (added(f"{Q}.lora_magnitude_vector", 4), "because use_dora is set"),
    "biases": (added(f"{Q}.bias", 4), "because bias is not 'none'"),
    "biases of lora_B": (added(f"{Q}.lora_B.bias", 4), "because lora_bias is set"),
    "whole modules": (added("base_model.model.lm_head.weight"), "has 'base_model.model.lm_head.weight': only pairs"),
    "experts": (renamed("mlp.", "mlp.experts.0."), "because target_modules names experts"),
    "a larger output head": (added(f"{Q}.base_layer.weight", 65, 64), "base_layer.weight', whose size was changed"),
    "a weight alone": (added("lm_head.base_layer.weight", 64, 64), "whose size was changed"),
    "half a pair": (
        tensors(lambda found: found.pop(f"{Q}.lora_B.weight")),
        r"has no lora_B for 'model\.layers\.0\.self",
    ),
    "two of a pair": (added(f"{Q}.lora_A.other.weight"), "has two of lora_A for 'model.layers.0.self_attn.q_proj'"),
    "no common rank": (
        tensors(lambda found: found.update({f"{Q}.lora_A.weight": mx.zeros((3, 64))})),
        "no common rank",
    ),
    "no rank": (
        tensors(lambda found: found.update({f"{Q}.lora_{m}.weight": mx.zeros(s) for m, s in EMPTY.items()})),
        "no common rank",
    ),
    "another rank than in the config": (change(r=8), r"the rank 8 \(r, rank_pattern\), and its weights have 4"),
    "another rank than in rank_pattern": (change(rank_pattern={"q_proj": 2}), r"q_proj the rank 2 \(r, rank_pattern"),
    "a layer of another size": (renamed("q_proj", "k_proj"), "use the model that it was trained for"),
    "a layer that is not there": (
        renamed("layers.1", "layers.77"),
        r"no linear layer for 'model\.layers\.77\.mlp",
    ),
    "the same layer twice": (
        tensors(lambda found: found.update({n.replace("model.model", "model"): a for n, a in list(found.items())})),
        r"adapts model\.layers\.0\..*_proj twice",
    ),
    "whole numbers": (added(f"{Q}2.lora_A.weight", dtype=mx.int32), "in I32 with 2 dimensions, which is no matrix"),
    "a matrix of three dimensions": (added(f"{Q}2.lora_A.weight", 2, 2, 2), "with 3 dimensions, which is no matrix"),
    "not finite": (tensors(lambda found: found.update({f"{Q}.lora_A.weight": mx.full((4, 64), mx.nan)})), "not finite"),
    "no tensors": (tensors(lambda found: found.clear()), "has no weights for any layer"),
    "long names": (added(f"{'x' * 5000}.lora_A.weight"), "only pairs"),
    "a name of several lines": (added("a\nb\nc.lora_A.weight"), "only pairs"),
    "no weights": (drop, "has no adapter_model.safetensors"),
    "pickled weights": (pickled, "adapter_model.bin is not read, because it may run code: save it again"),
    "damaged weights": (write_bytes(WEIGHTS, b"damaged"), "is not a safetensors file, or is cut short"),
    "weights that are cut short": (
        change_header(WEIGHTS, data_offsets=[2**40, 2**40 + 1024]),
        "is cut short|do not fit",
    ),
    "a config that is a list": (write(CONFIG, "[]"), "is not an object"),
    "an alpha of a text": (
        change(lora_alpha="16"),
        "lora_alpha in its adapter_config.json is '16', which is not a usable",
    ),
    "no alpha": (change(lora_alpha=None), "lora_alpha .* is None"),
    "an alpha that is no number": (change(lora_alpha=math.nan), "lora_alpha .* is nan"),
    "a huge alpha": (change(lora_alpha=10**400), "lora_alpha .* is 10+"),
    "a rank of yes": (change(r=True), "the r in its .* is True"),
    "patterns of a list": (
        change(alpha_pattern=["q_proj"]),
        "alpha_pattern .* is not an object of at most 2,048 names",
    ),
    "too many patterns": (change(rank_pattern={str(i): 1 for i in range(2049)}), "rank_pattern .* of at most 2,048"),
    "a pattern of a text": (
        change(alpha_pattern={"q_proj": "4"}),
        "alpha_pattern .* is '4', which is not a usable number",
    ),
    "a pattern that is no expression": (change(rank_pattern={"q_proj)": 4}), "rank_pattern .* has a wrong expression"),
    "a repeated group": (change(alpha_pattern={"((a|.)+)+x": 4}), "expressions that may take too long"),
    "many repeats": (change(alpha_pattern={".*.*.*.*x": 4}), "expressions that may take too long"),
    "many expressions": (
        change(rank_pattern={f".*{i}": 4 for i in range(17)}),
        "at most 16 may repeat something, 2 times each, and none a group; name the modules",
    ),
}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peft_adapter(model, tmp_path_factory.mktemp("whole") / "adapter").path


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_with_the_reason_in_one_line(
    model: Path, whole: Path, tmp_path: Path, name: str
) -> None:
    damage, reason = REFUSED[name]
    path = shutil.copytree(whole, tmp_path / "adapter")
    damage(path)
    begin = time.process_time()
    with pytest.raises(UnsupportedModelError) as error:
        load_model(str(model), LoadOptions(adapters=[AdapterPath("mine", path)]))
    assert time.process_time() - begin < SECONDS
    assert re.search(reason, message := str(error.value))
    assert message.startswith("the adapter 'mine'")
    assert "\n" not in message
    assert len(message) < 1000


def test_a_model_whose_weights_are_multiplied_when_they_load_is_refused(tmp_path: Path) -> None:
    model = make_architecture(tmp_path / "m", "falcon_h1")
    adapter = make_peft_adapter(model, tmp_path / "adapter", modules=("q_proj",))
    with pytest.raises(UnsupportedModelError, match="falcon_h1 models have other weights here than in transformers"):
        served_with(model, adapter)


def test_the_slowest_patterns_that_are_allowed_take_little_time() -> None:
    """For each of 200 modules."""
    many = {f"model.layers.{i}.self_attn.q_proj": i for i in range(2000)}
    slow = {f".*.*{'x' * (i + 1)}": 4 for i in range(peft.MAX_EXPRESSIONS)}
    patterns = peft.read_patterns("alpha_pattern", slow | many)
    begin = time.process_time()
    found = [patterns.of(f"language_model.model.layers.{i}.linear_attn.in_proj_qkvz", 1) for i in range(200)]
    assert found == [1] * 200
    assert time.process_time() - begin < SECONDS
