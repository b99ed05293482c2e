"""Makes the tower of LFM2-VL by a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlxpaged.vision.families.lfm2.format import Lfm2Format, Tiles
from mlxpaged.vision.families.lfm2.tower import MEAN, STD, Lfm2Sizes, Lfm2Tower
from mlxpaged.vision.family import MOST, Family, Settings, colours_of, number, resampling_of
from mlxpaged.vision.tower import Vision

PARTS = ("vision_tower.", "multi_modal_projector.")
"""How the names of a tower's weights begin. transformers wrote `vision_model.` after vision_tower in its versions 4."""

UNUSED = ("vision_tower.head.", "vision_tower.embeddings.position_ids")
"""A head for whole images, and the numbers of the places."""

ACTIVATIONS = {"hidden_act": "gelu_pytorch_tanh", "projector_hidden_act": "gelu"}


def name_of(name: str) -> str | None:
    name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(PARTS) and not name.startswith(UNUSED) else None


def make(settings: Settings) -> tuple[Vision, Lfm2Tower]:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    config = settings.config
    seen, text = config["vision_config"], config["text_config"]
    for values, (name, activation) in zip((seen, config), ACTIVATIONS.items(), strict=True):
        if values.get(name, activation) != activation:
            raise ValueError(f"its {name} is {values[name]}")
    if config.get("vision_feature_layer", -1) != -1:
        raise ValueError(f"its features come from layer {config['vision_feature_layer']} instead of the last")
    num_places = number(seen, "num_patches", 256)
    places = math.isqrt(num_places)
    if places**2 != num_places:
        raise ValueError(f"its {num_places} position embeddings are not those of a square")
    mean, std = colours_of(settings.images, MEAN, STD)
    sizes = Lfm2Sizes(
        width=number(seen, "hidden_size", 768),
        hidden=number(seen, "intermediate_size", 3072),
        blocks=number(seen, "num_hidden_layers", 12),
        heads=number(seen, "num_attention_heads", 12),
        patch=number(seen, "patch_size", 16),
        places=places,
        eps=float(seen.get("layer_norm_eps", 1e-6)),
        merge=number(config, "downsample_factor", 2),
        projector=number(config, "projector_hidden_size", 2560),
        bias=bool(config.get("projector_bias", True)),
        norm=bool(config.get("projector_use_layernorm", True)),
        output=number(text, "hidden_size"),
        mean=mean,
        std=std,
    )
    form = format_of(settings, sizes.patch * sizes.merge)
    tower = Lfm2Tower(sizes, form)
    return Vision(form, tower, small=replace(form, least=1)), tower


def format_of(settings: Settings, side: int) -> Lfm2Format:
    """Raises ValueError if a token or a limit is missing, or is none."""
    config, prompts = settings.config, settings.prompts
    limits = {**config, **settings.images}
    most = min(number(limits, "max_image_tokens", 256), max(1, settings.most_pixels // side**2))
    has_around = prompts.get("use_image_special_tokens", config.get("use_image_special_tokens", True))
    return Lfm2Format(
        placeholder=settings.token("<image>", "image_token_id", "image_token_index"),
        around=(settings.token("<|image_start|>"), settings.token("<|image_end|>")) if has_around else None,
        side=side,
        least=min(number(limits, "min_image_tokens", 64), most),
        most=most,
        tiles=tiles_of(settings, limits, side, bool(has_around)),
        resampling=resampling_of(settings.images, "BILINEAR"),
    )


def tiles_of(settings: Settings, limits: Mapping[str, Any], side: int, named: bool) -> Tiles | None:
    """limits: of the images, from all files. side: of what becomes one row of features. named: whether tokens stand
    before the tiles. Returns None if no image is split. Raises ValueError."""
    least, most = max(2, number(limits, "min_tiles", 2)), number(limits, "max_tiles", 10)
    of_tile = number(limits, "tile_size", 512)
    most = min(most, math.ceil(settings.most_pixels / of_tile**2))
    if not limits.get("do_image_splitting", True) or least > most:
        return None
    tolerance = limits.get("max_pixels_tolerance", 2.0)
    if type(tolerance) not in (int, float) or not 1 <= tolerance <= MOST["max_tiles"]:
        raise ValueError(f"its max_pixels_tolerance is {str(tolerance)[:100]}")
    if of_tile % side:
        raise ValueError(f"its tiles of {of_tile} pixels are not made of parts of {side}")
    if resampling_of(settings.images, "BILINEAR") != "BILINEAR":
        raise ValueError("its tiles are not made with the bilinear filter")
    grids = [(row, column) for row in range(most) for column in range(most) if (row + 1) * (column + 1) <= most]
    names = {(row, column): settings.token(f"<|img_row_{row + 1}_col_{column + 1}|>") for row, column in grids if named}
    thumbnail = bool(limits.get("use_thumbnail", True))
    return Tiles(
        side=of_tile,
        least=least,
        most=most,
        tolerance=float(tolerance),
        pixels=settings.most_pixels,
        thumbnail=thumbnail,
        names=names,
        thumbnail_name=settings.token("<|img_thumbnail|>") if named and thumbnail else None,
    )


LFM2 = Family({"siglip2_vision_model", "lfm2_vl", "lfm2-vl"}, name_of, make)
