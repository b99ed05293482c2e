"""A config.json of transformers 5 makes the model that one of transformers 4 makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.models.encoders.embedding import load_decoder
from mlxpaged.models.sources.model_files import ModelFiles
from tests.models.architectures import make_architecture

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6] * 8])

Config = dict[str, Any]


def load_generator(path: Path) -> tuple[Any, Config]:
    return ModelFiles(path).load(lambda done, total: None)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
LINEAR = {"factor": 8.0, "rope_type": "linear"}
WINDOWS = {"rope_theta": 50_000.0, "rope_local_base_freq": 500.0, "rope_scaling": LINEAR}


def scaled(config: Config) -> None:
    """One kind of positions for all layers."""
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")}


def by_layer_type(config: Config) -> None:
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": config.pop("rope_theta"), **config.pop("rope_scaling")},
        "sliding_attention": {"rope_theta": config.pop("rope_local_base_freq"), "rope_type": "default"},
    }


def in_text_config(config: Config) -> None:
    by_layer_type(config["text_config"])


def plain(config: Config) -> None:
    """The module has no default for either field."""
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    del config["rope_scaling"]


def part(config: Config) -> None:
    """Some dimensions are not rotated."""
    names = ("rope_theta", "partial_rotary_factor")
    config["rope_parameters"] = {"rope_type": "default", **{name: config.pop(name) for name in names}}


def experts(config: Config) -> None:
    config["num_local_experts"] = config.pop("num_experts")


def of_each_layer(config: Config) -> None:
    """Layers without a window have other heads."""
    heads = {"head_dim": config.pop("global_head_dim"), "num_key_value_heads": config.pop("num_global_key_value_heads")}
    full = [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    config["per_layer_config"] = {f"{index:02}": heads for index in full}


def experts_in_text_config(config: Config) -> None:
    experts(config["text_config"])


CASES: dict[str, tuple[str, Callable[[Config], None], Config]] = {
    "scaled": ("llama", scaled, {"rope_theta": 50_000.0, "rope_scaling": LLAMA3, "layer_types": None}),
    "by layer type": ("gemma3_text", by_layer_type, WINDOWS),
    "in a part": ("gemma3", in_text_config, WINDOWS),
    "without scaling": ("exaone4", plain, {"rope_theta": 50_000.0, "rope_scaling": None}),
    "partial": ("glm4", part, {"rope_theta": 50_000.0, "partial_rotary_factor": 0.5}),
    "experts": ("qwen3_moe", experts, {}),
    "experts in a part": ("qwen3_vl_moe", experts_in_text_config, {}),
    "heads": ("gemma4_text", of_each_layer, {}),
}


@pytest.mark.parametrize("load", [load_generator, load_decoder], ids=["text", "embeddings"])
@pytest.mark.parametrize("case", CASES)
def test_the_fields_of_transformers_5_are_those_of_4(
    case: str, load: Callable[[Path], tuple[Any, Config]], tmp_path: Path
) -> None:
    kind, rewrite, changes = CASES[case]
    path = make_architecture(tmp_path / "m", kind)
    config = json.loads((path / "config.json").read_text())
    config.get("text_config", config).update(changes)

    def logits() -> mx.array:
        (path / "config.json").write_text(json.dumps(config))
        found: mx.array = load(path)[0](PROMPT)
        return found

    expected = logits()
    rewrite(config)
    assert mx.array_equal(logits(), expected)
