"""A tiny tower of LFM2-VL's kind with random weights, and its files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.vision.families.lfm2.tower import Lfm2Sizes, Lfm2Tower

NORMED = Lfm2Sizes(
    width=24,
    hidden=20,
    blocks=2,
    heads=3,
    patch=4,
    places=5,
    eps=1e-2,
    merge=2,
    projector=18,
    bias=True,
    norm=True,
    output=16,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)
"""Of an LFM2-VL."""

PLAIN = replace(NORMED, norm=False)
"""Of an LFM2.5-VL."""


def tiny_tower(sizes: Lfm2Sizes, dtype: mx.Dtype = mx.float32) -> Lfm2Tower:
    """Its weights are large enough for each of them to change the features."""
    tower = Lfm2Tower(sizes)
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        spread = 1.0 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1])
        return (mx.random.normal(weight.shape) * spread).astype(dtype)

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def config_of(sizes: Lfm2Sizes, kind: str = "lfm2-vl") -> dict[str, Any]:
    return {
        "model_type": kind,
        "image_token_id": 9,
        "downsample_factor": sizes.merge,
        "projector_hidden_size": sizes.projector,
        "projector_bias": sizes.bias,
        "projector_use_layernorm": sizes.norm,
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.blocks,
            "num_attention_heads": sizes.heads,
            "patch_size": sizes.patch,
            "num_patches": sizes.places**2,
            "layer_norm_eps": sizes.eps,
        },
        "text_config": {"hidden_size": sizes.output},
    }


IMAGES = {
    "image_mean": NORMED.mean,
    "image_std": NORMED.std,
    "min_image_tokens": 4,
    "max_image_tokens": 64,
    "do_image_splitting": False,
}

TILES = {"do_image_splitting": True, "tile_size": 16, "min_image_tokens": 1, "max_image_tokens": 4}
"""Settings of images that are split."""


def stored_weights(tower: Lfm2Tower, kind: str) -> dict[str, mx.array]:
    """Its weights by their names in a checkpoint of transformers 4, transformers 5 or mlx-vlm."""
    before, within = {"4": ("model.", "vision_model."), "5": ("model.", ""), "mlx-vlm": ("", "")}[kind]
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    return {before + name.replace("vision_tower.", f"vision_tower.{within}"): each for name, each in weights.items()}


def files(path: Path, weights: dict[str, mx.array], name: str = "model.safetensors") -> Path:
    mx.save_safetensors(str(path / name), weights)
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return path
