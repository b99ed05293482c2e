"""Makes the tower of Qwen3-VL, Qwen3.5 and Qwen3.6 by a model's configuration."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxpaged.models.vision_family import Family, Settings, colours_of
from mlxpaged.vision.positions import Axes
from mlxpaged.vision.qwen import MEAN, STD, QwenSizes, QwenTower
from mlxpaged.vision.qwen_format import QwenFormat
from mlxpaged.vision.tower import Vision

PARTS = ("visual.", "vision_tower.")
"""How the names of a tower's weights begin: transformers writes the first, mlx-vlm the second."""

CONVOLUTION = "patch_embed.proj.weight"

ACTIVATION = "gelu_pytorch_tanh"

LEAST, MOST = 65_536, 16_777_216
"""Pixels of a picture if the files do not say."""


def name_of(name: str) -> str | None:
    return next((name.removeprefix(part) for part in PARTS if name.startswith(part)), None)


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
    mean, std = colours_of(settings.pictures, MEAN, STD)
    places = round(seen["num_position_embeddings"] ** 0.5)
    sizes = QwenSizes(
        width=seen["hidden_size"],
        hidden=seen["intermediate_size"],
        blocks=seen["depth"],
        heads=seen["num_heads"],
        patch=seen["patch_size"],
        merge=seen["spatial_merge_size"],
        places=places,
        deep=tuple(seen.get("deepstack_visual_indexes") or ()),
        output=seen.get("out_hidden_size", text["hidden_size"]),
        mean=mean,
        std=std,
    )
    if (
        seen.get("hidden_act", "gelu_pytorch_tanh") != "gelu_pytorch_tanh"
        or places**2 != seen["num_position_embeddings"]
    ):
        raise ValueError("its vision_config is not that of a Qwen3 tower")
    tower = QwenTower(sizes)
    return Vision(format_of(settings, sizes), tower, axes_of(text), len(sizes.deep)), tower


def axes_of(text: dict[str, Any]) -> Axes:
    """Raises ValueError if the text model does not rotate by three axes."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3:
        raise ValueError(f"its mrope_section is {sections}")
    return Axes((int(sections[0]), int(sections[1]), int(sections[2])), bool(rope.get("mrope_interleaved", True)))


def format_of(settings: Settings, sizes: QwenSizes) -> QwenFormat:
    pictures, size = settings.pictures, settings.pictures.get("size") or {}
    least = pictures.get("min_pixels") or size.get("shortest_edge") or LEAST
    most = pictures.get("max_pixels") or size.get("longest_edge") or MOST
    if not (type(least) is int and type(most) is int and 0 < least <= most):
        raise ValueError(f"its pictures have from {least} to {most} pixels")
    placeholder = settings.config.get("image_token_id")
    if placeholder is None:
        placeholder = settings.token("<|image_pad|>")
    return QwenFormat(int(placeholder), sizes.patch * sizes.merge, least, most)


QWEN = Family({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}, name_of, prepare, make)
