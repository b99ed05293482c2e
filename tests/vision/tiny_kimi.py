"""A tiny tower of Kimi-VL's kind with random weights, and its files as those of Kimi-VL and of Kimi K2.5."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from mlxpaged.vision.families.kimi.tower import KimiSizes, KimiTower

SIZES = KimiSizes(
    width=24,
    hidden=20,
    blocks=2,
    heads=3,
    patch=4,
    places=(5, 6),
    merge=2,
    output=16,
    mean=(0.5, 0.4, 0.3),
    std=(0.25, 0.5, 0.2),
)
CONVOLUTION = "vision_tower.patch_embed.proj.weight"
IMAGES = {"image_mean": SIZES.mean, "image_std": SIZES.std, "in_token_limit": 256, "pad_input": True}


def tiny_tower(sizes: KimiSizes = SIZES, dtype: mx.Dtype = mx.float32) -> KimiTower:
    """Its weights are large enough for each of them to change the features."""
    tower = KimiTower(sizes)
    mx.random.seed(5)

    def random(name: str, weight: mx.array) -> mx.array:
        spread = 1.0 if weight.ndim != 2 else 1.5 / math.sqrt(weight.shape[-1])
        return (mx.random.normal(weight.shape) * spread).astype(dtype)

    tower.update(tree_map_with_path(random, tower.parameters()))
    mx.eval(tower.parameters())
    return tower


def config_of(sizes: KimiSizes = SIZES) -> dict[str, Any]:
    return {
        "model_type": "kimi_vl",
        "media_placeholder_token_id": 9,
        "vision_config": {
            "model_type": "moonvit",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.blocks,
            "num_attention_heads": sizes.heads,
            "patch_size": sizes.patch,
            "init_pos_emb_height": sizes.places[0],
            "init_pos_emb_width": sizes.places[1],
            "merge_kernel_size": [sizes.merge, sizes.merge],
        },
        "text_config": {"hidden_size": sizes.output},
    }


def stored_weights(tower: KimiTower, of_mlx_vlm: bool) -> dict[str, mx.array]:
    """Its weights by their names in a checkpoint of the models' own code or of mlx-vlm, with a convolution."""
    side = tower.sizes.patch
    weights: dict[str, mx.array] = dict(tree_flatten(tower.parameters()))
    stored = {}
    for name, weight in weights.items():
        if name == CONVOLUTION:
            weight = weight.reshape(-1, side, side, 3)
            weight = weight if of_mlx_vlm else weight.transpose(0, 3, 1, 2)
        if of_mlx_vlm:
            name = name.replace("encoder.", "").replace(".wqkv", ".attn.wqkv").replace(".wo", ".attn.wo")
        stored[name] = mx.contiguous(weight)
    return stored


def config_of_k2_5(sizes: KimiSizes = SIZES) -> dict[str, Any]:
    """With the names of the published configuration."""
    return {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": 9,
        "vision_config": {
            "model_type": "",
            "init_pos_emb_height": sizes.places[0],
            "init_pos_emb_time": 4,
            "init_pos_emb_width": sizes.places[1],
            "merge_kernel_size": [sizes.merge, sizes.merge],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": sizes.width,
            "mm_projector_type": "patchmerger",
            "patch_size": sizes.patch,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": sizes.output,
            "video_attn_type": "spatial_temporal",
            "vt_hidden_size": sizes.width,
            "vt_intermediate_size": sizes.hidden,
            "vt_num_attention_heads": sizes.heads,
            "vt_num_hidden_layers": sizes.blocks,
        },
        "text_config": {"hidden_size": sizes.output},
    }


MEDIA = {
    "media_proc_cfg": {
        "in_patch_limit": 256,
        "patch_size": SIZES.patch,
        "image_mean": SIZES.mean,
        "image_std": SIZES.std,
        "merge_kernel_size": SIZES.merge,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 100,
    }
}
"""How a processor of Kimi K2.5 is set."""


def stored_weights_of_k2_5(tower: KimiTower, of_mlx_vlm: bool) -> dict[str, mx.array]:
    names = {"pre_norm": "pre_norm", "linear_1": "proj.0", "linear_2": "proj.2"}
    stored = {}
    for name, weight in stored_weights(tower, of_mlx_vlm).items():
        for ours, theirs in names.items():
            name = name.replace(f"multi_modal_projector.{ours}", f"mm_projector.{theirs}")
        stored[name] = weight
    return stored


def files(path: Path, weights: dict[str, mx.array], name: str = "model.safetensors") -> Path:
    mx.save_safetensors(str(path / name), weights)
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return path
