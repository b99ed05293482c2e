"""Makes the towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Qwen3.6, by a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxpaged.vision.families.pixtral.tower import MEAN as CLIP_MEAN
from mlxpaged.vision.families.pixtral.tower import STD as CLIP_STD
from mlxpaged.vision.families.qwen.format import QwenFormat
from mlxpaged.vision.families.qwen.qwen2_5 import Qwen25Sizes, Qwen25Tower
from mlxpaged.vision.families.qwen.tower import MEAN, STD, QwenSizes, QwenTower
from mlxpaged.vision.family import Family, Settings, colours_of, number
from mlxpaged.vision.positions import Axes
from mlxpaged.vision.tower import Vision

PARTS = ("visual.", "vision_tower.")
"""How the names of a tower's weights begin: transformers writes the first, mlx-vlm the second."""

CONVOLUTION = "patch_embed.proj.weight"

ACTIVATION = "gelu_pytorch_tanh"

LEAST, MOST = 65_536, 16_777_216
"""Pixels of an image of the newer models if the files do not say."""


def name_of(name: str) -> str | None:
    return next((name.removeprefix(part) for part in PARTS if name.startswith(part)), None)


def name_of_2_5(name: str) -> str | None:
    """The checkpoints count the layers of the merger, the activation included."""
    found = name_of(name)
    return found and found.replace("merger.mlp.0.", "merger.linear_fc1.").replace("merger.mlp.2.", "merger.linear_fc2.")


def name_of_2(name: str) -> str | None:
    """The checkpoints of Qwen2-VL have other names for the norm of the merger and for the feed-forward layers."""
    found = name_of_2_5(name)
    return found and found.replace("merger.ln_q.", "merger.norm.").replace(".mlp.fc", ".mlp.linear_fc")


def prepare(stored: dict[str, mx.array]) -> None:
    """Makes the convolution a linear layer of whole patches, of one frame instead of two."""
    patches = stored.get(CONVOLUTION)
    if patches is not None and patches.ndim == 5:
        if patches.shape[3] == patches.shape[4] != patches.shape[1]:  # torch's: [width, colours, frames, side, side]
            patches = patches.transpose(0, 2, 3, 4, 1)
        of_one = patches.astype(mx.float32).sum(axis=1).astype(patches.dtype)
        stored[CONVOLUTION] = of_one.flatten(1)


def make(settings: Settings) -> tuple[Vision, QwenTower]:
    seen, text = settings.config["vision_config"], settings.config["text_config"]
    mean, std = colours_of(settings.images, MEAN, STD)
    places = round(number(seen, "num_position_embeddings") ** 0.5)
    sizes = QwenSizes(
        width=number(seen, "hidden_size"),
        hidden=number(seen, "intermediate_size"),
        blocks=number(seen, "depth"),
        heads=number(seen, "num_heads"),
        patch=number(seen, "patch_size"),
        merge=number(seen, "spatial_merge_size"),
        places=places,
        deep=deep_blocks(seen),
        output=number(seen, "out_hidden_size", text["hidden_size"]),
        mean=mean,
        std=std,
    )
    if (
        seen.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh"
        or places**2 != seen["num_position_embeddings"]
    ):
        raise ValueError("its vision_config is not that of a Qwen3 tower")
    tower = QwenTower(sizes)
    axes = axes_of(text, interleaved=True)
    form = format_of(settings, sizes.patch * sizes.merge)
    return Vision(form, tower, axes, len(sizes.deep), small=replace(form, least=1)), tower


def deep_blocks(seen: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the blocks that features are taken after. Raises ValueError if they are not blocks, in order."""
    found = seen.get("deepstack_visual_indexes") or []
    if not isinstance(found, list) or [block for block in range(seen["depth"]) if block in found] != found:
        raise ValueError(f"its deepstack_visual_indexes are {str(found)[:100]}")
    return tuple(found)


def make_2(settings: Settings) -> tuple[Vision, QwenTower]:
    config = settings.config
    seen, text = config["vision_config"], config.get("text_config", config)
    if seen.get("hidden_act", "quick_gelu") != "quick_gelu":
        raise ValueError(f"its activation is {seen['hidden_act']}")
    mean, std = colours_of(settings.images, CLIP_MEAN, CLIP_STD)
    width = number(seen, "embed_dim", 1280)
    sizes = QwenSizes(
        width=width,
        hidden=width * number(seen, "mlp_ratio", 4),
        blocks=number(seen, "depth", 32),
        heads=number(seen, "num_heads", 16),
        patch=number(seen, "patch_size", 14),
        merge=number(seen, "spatial_merge_size", 2),
        places=None,
        deep=(),
        output=number(seen, "hidden_size", text["hidden_size"]),
        mean=mean,
        std=std,
        activation="quick_gelu",
    )
    tower = QwenTower(sizes)
    form = clip_format_of(settings, sizes.patch * sizes.merge)
    return Vision(form, tower, axes_of(text, interleaved=False), small=replace(form, least=1)), tower


def make_2_5(settings: Settings) -> tuple[Vision, Qwen25Tower]:
    config = settings.config
    seen, text = config["vision_config"], config.get("text_config", config)
    if seen.get("hidden_act", "silu") != "silu":
        raise ValueError(f"its activation is {seen['hidden_act']}")
    mean, std = colours_of(settings.images, CLIP_MEAN, CLIP_STD)
    sizes = Qwen25Sizes(
        width=number(seen, "hidden_size", 1280),
        hidden=number(seen, "intermediate_size", 3420),
        blocks=number(seen, "depth", 32),
        heads=number(seen, "num_heads", 16),
        patch=number(seen, "patch_size", 14),
        merge=number(seen, "spatial_merge_size", 2),
        window=number(seen, "window_size", 112) // number(seen, "patch_size", 14),
        whole=tuple(seen.get("fullatt_block_indexes", (7, 15, 23, 31))),
        output=number(seen, "out_hidden_size", text["hidden_size"]),
        mean=mean,
        std=std,
    )
    if sizes.window == 0 or sizes.window % sizes.merge:
        raise ValueError(f"its windows of {sizes.window} patches are not made of whole squares")
    tower = Qwen25Tower(sizes)
    form = clip_format_of(settings, sizes.patch * sizes.merge)
    return Vision(form, tower, axes_of(text, interleaved=False), small=replace(form, least=1)), tower


def axes_of(text: Mapping[str, Any], interleaved: bool) -> Axes:
    """Raises ValueError if the text model does not rotate by three axes."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        raise ValueError(f"its mrope_section is {sections}")
    return Axes(
        (int(sections[0]), int(sections[1]), int(sections[2])), bool(rope.get("mrope_interleaved", interleaved))
    )


def clip_format_of(settings: Settings, side: int) -> QwenFormat:
    """The format of the older models."""
    return format_of(settings, side, least=4 * side**2, most=16_384 * side**2)


def format_of(settings: Settings, side: int, least: int = LEAST, most: int = MOST) -> QwenFormat:
    """least, most: pixels of an image if the files do not say."""
    least, most = pixels_of(settings, least, most)
    placeholder = settings.token("<|image_pad|>", "image_token_id")
    return QwenFormat(placeholder=placeholder, side=side, least=least, most=most)


def pixels_of(settings: Settings, least: int, most: int) -> tuple[int, int]:
    """Returns from how many to how many pixels an image has. least, most: if the files do not say. Raises
    ValueError."""
    images, size = settings.images, settings.images.get("size")
    size = size if isinstance(size, Mapping) else {}
    least = images.get("min_pixels") or size.get("shortest_edge") or least
    most = images.get("max_pixels") or size.get("longest_edge") or most
    if not (type(least) is int and type(most) is int and 0 < least <= most):
        raise ValueError(f"its images have from {least} to {most} pixels")
    most = min(most, settings.most_pixels)
    return min(least, most), most


QWEN = Family({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"}, name_of, make, prepare)
QWEN_2 = Family({"qwen2_vl"}, name_of_2, make_2, prepare)
QWEN_2_5 = Family({"qwen2_5_vl"}, name_of_2_5, make_2_5, prepare)
