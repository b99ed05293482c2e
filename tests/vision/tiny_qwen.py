"""A tiny tower of Qwen's kind with random weights, and its files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.vision.families.qwen.tower import QwenSizes, QwenTower

DEEP = QwenSizes(
    width=24,
    hidden=20,
    blocks=3,
    heads=3,
    patch=4,
    merge=2,
    places=5,
    deep=(0, 2),
    output=16,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)
"""Of a Qwen3-VL."""

PLAIN = replace(DEEP, deep=())
"""Of a Qwen3.5."""

OLD = replace(PLAIN, hidden=48, places=None, activation="quick_gelu")
"""Of a Qwen2-VL."""

OLD_NAMES = {
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "merger.norm": "merger.ln_q",
    "merger.linear_fc1": "merger.mlp.0",
    "merger.linear_fc2": "merger.mlp.2",
}
"""Endings of the names of layers in the files of a Qwen2-VL, by those in the tower."""


def tiny_tower(sizes: QwenSizes) -> QwenTower:
    """Its weights are large enough for each of them to change the features."""
    tower = QwenTower(sizes)
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        spread = 1.0 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1])
        return mx.random.normal(weight.shape) * spread

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def config_of(sizes: QwenSizes, kind: str) -> dict[str, Any]:
    seen = {
        "model_type": kind,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "depth": sizes.blocks,
        "num_heads": sizes.heads,
        "patch_size": sizes.patch,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": 2,
        "num_position_embeddings": (sizes.places or 0) ** 2,
        "out_hidden_size": sizes.output,
        "deepstack_visual_indexes": list(sizes.deep),
    }
    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return {
        "model_type": kind,
        "vision_config": seen,
        "text_config": {"hidden_size": sizes.output, "rope_parameters": rope},
        "image_token_id": 9,
    }


def old_config() -> dict[str, Any]:
    """The text model's configuration is beside that of the tower."""
    return {
        "model_type": "qwen2_vl",
        "hidden_size": OLD.output,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
        "image_token_id": 9,
        "vision_config": {
            "model_type": "qwen2_vl",
            "embed_dim": OLD.width,
            "mlp_ratio": OLD.hidden // OLD.width,
            "depth": OLD.blocks,
            "num_heads": OLD.heads,
            "patch_size": OLD.patch,
            "spatial_merge_size": OLD.merge,
            "hidden_size": OLD.output,
        },
    }


def old_name(name: str) -> str:
    """The name of a weight in the files of a Qwen2-VL."""
    for ours, theirs in OLD_NAMES.items():
        name = name.replace(f"{ours}.", f"{theirs}.")
    return name


def files(path: Path, sizes: QwenSizes, prefix: str, of_torch: bool, name: str = "model.safetensors") -> Path:
    """Writes a checkpoint whose convolution takes two frames, with weights that add up to the tower's."""
    weights: dict[str, mx.array] = dict(tree_flatten(tiny_tower(sizes).parameters()))
    patches = weights["patch_embed.proj.weight"].reshape(-1, 1, sizes.patch, sizes.patch, 3)
    first = mx.random.normal(patches.shape, key=mx.random.key(3))
    patches = mx.concatenate([first, patches - first], axis=1)
    weights["patch_embed.proj.weight"] = patches.transpose(0, 4, 1, 2, 3) if of_torch else patches
    rename = old_name if sizes.places is None else str
    named = {f"{prefix}{rename(name)}": mx.contiguous(weight) for name, weight in weights.items()}
    mx.save_safetensors(str(path / name), named)
    images = {"image_mean": sizes.mean, "image_std": sizes.std, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    (path / "preprocessor_config.json").write_text(json.dumps(images))
    return path


def make_seeing(path: Path, kind: str) -> Path:
    """Gives a tiny text model of this type a tower, and three axes."""
    deep, sections = ((0, 2), [4, 2, 2]) if kind.startswith("qwen3_vl") else ((), [1, 1, 0])
    config = json.loads((path / "config.json").read_text())
    sizes = replace(DEEP, output=config["text_config"]["hidden_size"], deep=deep)
    files(path, sizes, "vision_tower.", False, "model-tower.safetensors")
    text = config["text_config"] | {"rope_scaling": {"type": "default", "mrope_section": sections}}
    (path / "config.json").write_text(json.dumps(config | config_of(sizes, kind) | {"text_config": text}))
    return path
