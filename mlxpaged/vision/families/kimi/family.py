"""Makes the towers of Kimi-VL and Kimi K2.5 by a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxpaged.vision.families.kimi.format import PATCHES, KimiFormat
from mlxpaged.vision.families.kimi.tower import MEAN, NORM_EPS, STD, KimiSizes, KimiTower
from mlxpaged.vision.family import Family, Settings, colours_of, flatten_convolution, number
from mlxpaged.vision.tower import Vision

PARTS = ("vision_tower.", "multi_modal_projector.")
"""How the names of a tower's weights begin."""

ENCODER = {f"vision_tower.{part}": f"vision_tower.encoder.{part}" for part in ("blocks.", "final_layernorm.")}
"""mlx-vlm leaves the encoder out of these names."""

CONVOLUTION = "vision_tower.patch_embed.proj.weight"


def name_of(name: str) -> str | None:
    """mlx-vlm writes `attn.` before the two layers of attention."""
    for theirs, ours in ENCODER.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs).replace(".attn.w", ".w", 1)
    return name if name.startswith(PARTS) else None


def prepare(stored: dict[str, mx.array]) -> None:
    flatten_convolution(stored, CONVOLUTION)


def make(settings: Settings) -> tuple[Vision, KimiTower]:
    """What is left out has the value that the models' own code takes, but for the colours, which it takes from the
    files of all models. Raises ValueError, KeyError or TypeError."""
    most = number(settings.images, "in_token_limit", 4096)
    return made(settings, settings.config["vision_config"], settings.images, most, PATCHES)


def made(
    settings: Settings, seen: Mapping[str, Any], images: Mapping[str, Any], most: int, longest: int
) -> tuple[Vision, KimiTower]:
    """seen: the sizes of the tower. images: how its pixels become numbers. most, longest: patches of an image and of a
    side."""
    config = settings.config
    mean, std = colours_of(images, MEAN, STD)
    sizes = KimiSizes(
        width=number(seen, "hidden_size", 1152),
        hidden=number(seen, "intermediate_size", 4304),
        blocks=number(seen, "num_hidden_layers", 27),
        heads=number(seen, "num_attention_heads", 16),
        patch=number(seen, "patch_size", 14),
        places=(number(seen, "init_pos_emb_height", 64), number(seen, "init_pos_emb_width", 64)),
        merge=merge_of(seen),
        output=number(config["text_config"], "hidden_size"),
        mean=mean,
        std=std,
    )
    if sizes.width % (4 * sizes.heads):
        raise ValueError(f"its {sizes.heads} heads of {sizes.width} elements cannot turn with rows and columns")
    tower = KimiTower(sizes)
    image_format = KimiFormat(
        placeholder=settings.token("<|media_pad|>", "media_placeholder_token_id", "image_token_index"),
        side=sizes.patch * sizes.merge,
        merge=sizes.merge,
        most=min(most, max(1, settings.most_pixels // sizes.patch**2)),
        longest=longest,
    )
    return Vision(image_format, tower), tower


def images_of(settings: Settings) -> Mapping[str, Any]:
    """The settings of images, which Kimi K2.5 and K3 have in an object of their own."""
    found: Mapping[str, Any] = settings.images.get("media_proc_cfg") or settings.images
    return found


def merge_of(seen: Mapping[str, Any]) -> int:
    """Returns the side of a square of patches that becomes one row of features. Raises ValueError."""
    found = seen.get("merge_kernel_size") or [2, 2]
    if not isinstance(found, list) or len(found) != 2 or found[0] != found[1]:
        raise ValueError(f"its merge_kernel_size is {str(found)[:100]}")
    return number({"spatial_merge_size": found[0]}, "spatial_merge_size")


KIMI = Family({"moonvit", "kimi_vl"}, name_of, make, prepare)


PROJECTOR = {
    "mm_projector.pre_norm.": "multi_modal_projector.pre_norm.",
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
}
"""The checkpoints of Kimi K2.5 count the layers of the projector, the activation included."""

EXPECTED = {
    "activation_func": "gelu_pytorch_tanh",
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": NORM_EPS,
    "pos_emb_interpolation_mode": "bicubic",
}
"""With these, an image is a video of one frame: it has no embedding of time, and the mean over frames is itself. So the
tower of Kimi K2.5 is Kimi-VL's."""


def name_of_k2_5(name: str) -> str | None:
    for theirs, ours in PROJECTOR.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name_of(name) if name.startswith("vision_tower.") else None


def make_k2_5(settings: Settings) -> tuple[Vision, KimiTower]:
    """The sizes of the tower have names that begin with `vt_`, and the settings of images are in an object of their
    own. mlx-vlm writes both as for Kimi-VL."""
    seen: dict[str, Any] = {}
    for name, value in settings.config["vision_config"].items():
        seen[name.removeprefix("vt_")] = value
    for name, expected in EXPECTED.items():
        if seen.get(name, expected) != expected:
            raise ValueError(f"its {name} is {str(seen[name])[:100]}")
    images = images_of(settings)
    if images.get("fixed_output_tokens") is not None:
        raise ValueError(f"its fixed_output_tokens are {str(images['fixed_output_tokens'])[:100]}")
    most = number(images, "in_patch_limit", 16_384)
    return made(settings, seen, images, most, number(images, "patch_limit_on_one_side", 512))


KIMI_K2_5 = Family({"", "kimi_k25", "kimi_k25_vision", "moonvit"}, name_of_k2_5, make_k2_5, prepare)
"""Kimi K2.6 and later ones of its type, too. The first is the model type that the checkpoints' vision_config has."""
