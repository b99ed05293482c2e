"""Published weights with other names than those of mlx-lm's modules make the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.models.files.weight_names import Weights
from mlxpaged.models.fit import layers_of
from mlxpaged.models.loader import load_model
from tests.models.architectures import make_architecture


def of_transformers(weights: Weights, config: dict[str, Any]) -> Weights:
    """Of LFM2-VL, with convolutions as torch has them, a tied head and a tower."""
    config["model_type"] = "lfm2_vl"
    renamed = {
        name.replace("language_model.model.", "model.language_model."): mx.contiguous(weight.swapaxes(1, 2))
        if "conv.weight" in name
        else weight
        for name, weight in weights.items()
    }
    tower = {"model.vision_tower.vision_model.post_layernorm.weight": mx.ones(4)}
    return renamed | tower | {"lm_head.weight": weights["language_model.model.embed_tokens.weight"]}


def of_one_projection(weights: Weights, config: dict[str, Any]) -> Weights:
    """Of Kimi-VL."""
    joined = {}
    for name, weight in weights.items():
        if name.endswith("embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            whole = mx.concatenate([weight.swapaxes(1, 2), values], axis=1)
            joined[name.replace("embed_q", "kv_b_proj")] = whole.flatten(0, 1)
        elif not name.endswith("unembed_out.weight"):
            joined[name] = weight
    assert len(joined) < len(weights)
    return joined


def nested(weights: Weights, config: dict[str, Any]) -> Weights:
    """Of Muse Glimmer, with a tower beside the text model."""
    renamed = {
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: weight
        for name, weight in weights.items()
    }
    assert "lm_head.weight" in renamed
    tower = ("vision_tower.ln_pre.weight", "vision_adapter.fc1.weight", "vision_projection.weight")
    return renamed | {f"model.{name}": mx.ones(4) for name in tower}


@pytest.mark.parametrize(
    ("kind", "publish"),
    [("lfm2-vl", of_transformers), ("kimi_vl", of_one_projection), ("muse_glimmer", nested)],
    ids=["lfm2_vl", "kimi_vl", "muse_glimmer"],
)
def test_published_weights_are_loaded(tmp_path: Path, kind: str, publish: Any) -> None:
    path = make_architecture(tmp_path / "m", kind)
    tokens = mx.array([[5, 17, 9, 40]])
    expected: Any = load_model(str(path)).model
    expected = expected(tokens)
    [file] = path.glob("*.safetensors")
    config = json.loads((path / "config.json").read_text())
    weights: Any = mx.load(str(file))
    published = publish(weights, config)
    mx.eval(published)
    mx.save_safetensors(str(file), published)
    (path / "config.json").write_text(json.dumps(config))
    served = load_model(str(path))
    model: Any = served.model
    assert mx.array_equal(model(tokens), expected)
    assert len(layers_of(path)) == len(served.layers)
