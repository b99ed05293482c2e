"""Makes the tower of Kimi-VL by a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxpaged.models.vision_family import Family, Settings, colours_of, flatten_convolution, number
from mlxpaged.vision.kimi import MEAN, STD, KimiSizes, KimiTower
from mlxpaged.vision.kimi_format import KimiFormat
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
    config = settings.config
    seen, text = config["vision_config"], config["text_config"]
    mean, std = colours_of(settings.images, MEAN, STD)
    sizes = KimiSizes(
        width=number(seen, "hidden_size", 1152),
        hidden=number(seen, "intermediate_size", 4304),
        blocks=number(seen, "num_hidden_layers", 27),
        heads=number(seen, "num_attention_heads", 16),
        patch=number(seen, "patch_size", 14),
        places=(number(seen, "init_pos_emb_height", 64), number(seen, "init_pos_emb_width", 64)),
        merge=merge_of(seen),
        output=number(text, "hidden_size"),
        mean=mean,
        std=std,
    )
    if sizes.width % (4 * sizes.heads):
        raise ValueError(f"its {sizes.heads} heads of {sizes.width} elements cannot turn with rows and columns")
    tower = KimiTower(sizes)
    placeholder = config.get("media_placeholder_token_id", config.get("image_token_index"))
    most = number(settings.images, "in_token_limit", 4096)
    image_format = KimiFormat(
        placeholder=settings.token("<|media_pad|>") if placeholder is None else int(placeholder),
        side=sizes.patch * sizes.merge,
        merge=sizes.merge,
        most=min(most, max(1, settings.most_pixels // sizes.patch**2)),
    )
    return Vision(image_format, tower), tower


def merge_of(seen: Mapping[str, Any]) -> int:
    """Returns the side of a square of patches that becomes one row of features. Raises ValueError."""
    found = seen.get("merge_kernel_size") or [2, 2]
    if not isinstance(found, list) or len(found) != 2 or found[0] != found[1]:
        raise ValueError(f"its merge_kernel_size is {str(found)[:100]}")
    return number({"spatial_merge_size": found[0]}, "spatial_merge_size")


KIMI = Family({"moonvit", "kimi_vl"}, name_of, prepare, make)
