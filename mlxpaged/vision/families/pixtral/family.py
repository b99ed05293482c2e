"""Makes the tower of Pixtral and Mistral 3 by a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.families.pixtral.tower import ACTIVATIONS, MEAN, STD, PixtralSizes, PixtralTower
from mlxpaged.vision.family import Family, Settings, colours_of, flatten_convolution, number
from mlxpaged.vision.tower import Vision

MERGES = {"mistral3": True, "pixtral": False, "llava": False}
"""Whether the projector has a merger of patches, by model type. With the type pixtral, mlx-vlm writes what transformers
calls llava."""

PARTS = ("vision_tower.", "multi_modal_projector.")
"""How the names of a tower's weights begin. mlx-vlm writes `vision_model.` after vision_tower."""

CONVOLUTION = "vision_tower.patch_conv.weight"


def name_of(name: str) -> str | None:
    name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(PARTS) else None


def prepare(stored: dict[str, mx.array]) -> None:
    flatten_convolution(stored, CONVOLUTION)


def make(settings: Settings) -> tuple[Vision, PixtralTower]:
    sizes = sizes_of(settings.config, settings.images)
    tower = PixtralTower(sizes)
    return Vision(format_of(settings, sizes), tower), tower


def sizes_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> PixtralSizes:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    seen, text, merges = config["vision_config"], config["text_config"], MERGES[config["model_type"]]
    layer = config.get("vision_feature_layer", -2 if config["model_type"] == "llava" else -1)
    blocks = number(seen, "num_hidden_layers", 24)
    if layer not in (-1, blocks):
        raise ValueError(f"its features come from layer {layer} instead of the last")
    activations = (seen.get("hidden_act", "gelu"), config.get("projector_hidden_act", "gelu"))
    for name in activations:
        if name not in ACTIVATIONS:
            raise ValueError(f"its activation {name} is none of {', '.join(ACTIVATIONS)}")
    rope = seen.get("rope_parameters") or seen
    mean, std = colours_of(preprocessor, MEAN, STD)
    return PixtralSizes(
        width=number(seen, "hidden_size", 1024),
        hidden=number(seen, "intermediate_size", 4096),
        blocks=blocks,
        heads=number(seen, "num_attention_heads", 16),
        patch=number(seen, "patch_size", 16),
        rope_base=float(rope.get("rope_theta", 10000.0)),
        activation=activations[0],
        merge=number(config, "spatial_merge_size", 2) if merges else None,
        output=number(text, "hidden_size"),
        projector_activation=activations[1],
        bias=config.get("multimodal_projector_bias", not merges),
        merger_eps=float(text.get("rms_norm_eps", 1e-6)),
        mean=mean,
        std=std,
    )


def format_of(settings: Settings, sizes: PixtralSizes) -> PixtralFormat:
    """Raises ValueError if a token or a size is missing, or is none."""
    config = settings.config

    def token(name: str, default: str, *names: str) -> int:
        return settings.token(settings.prompts.get(name, default), *names)

    size = settings.images.get("size") or {"longest_edge": config["vision_config"].get("image_size", 1024)}
    edge = size.get("longest_edge")
    longest: Any = (edge, edge) if edge else (size.get("width"), size.get("height"))
    if not all(type(each) is int and each > 0 for each in longest):
        raise ValueError(f"the size of its images is {size}")
    edge_of_most = math.isqrt(settings.most_pixels)
    longest = tuple(min(each, edge_of_most) for each in longest)
    return PixtralFormat(
        placeholder=token("image_token", "[IMG]", "image_token_index", "image_token_id"),
        row_end=token("image_break_token", "[IMG_BREAK]"),
        end=token("image_end_token", "[IMG_END]"),
        longest=longest,
        side=sizes.patch * (sizes.merge or 1),
    )


PIXTRAL = Family({"pixtral"}, name_of, make, prepare)
