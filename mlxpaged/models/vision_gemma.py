"""Makes the tower of Gemma 3 by a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxpaged.models.vision_family import Family, Settings, colours_of, flatten_convolution, number, resampling_of
from mlxpaged.vision.gemma3 import MEAN, STD, Gemma3Sizes, Gemma3Tower
from mlxpaged.vision.gemma_format import Gemma3Format
from mlxpaged.vision.tower import Vision

ACTIVATION = "gelu_pytorch_tanh"

PARTS = ("vision_tower.embeddings.", "vision_tower.encoder.", "vision_tower.post_layernorm.", "multi_modal_projector.")
"""How the names of the weights of Gemma 3's tower begin, without the `vision_model.` that most files have after
vision_tower. Files of SigLIP may also have a head, which Gemma does not use."""

CONVOLUTION = "vision_tower.embeddings.patch_embedding.weight"


def name_of(name: str) -> str | None:
    name = name.replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(PARTS) and not name.endswith(".position_ids") else None


def prepare(stored: dict[str, mx.array]) -> None:
    flatten_convolution(stored, CONVOLUTION)


def make(settings: Settings) -> tuple[Vision, Gemma3Tower]:
    """Every token of a picture sees all of its others, in all layers (Gemma3Model of transformers)."""
    sizes = sizes_of(settings.config, settings.pictures)
    tower = Gemma3Tower(sizes)
    return Vision(format_of(settings, sizes), tower, mutual="all"), tower


def sizes_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma3Sizes:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    seen, text = config["vision_config"], config["text_config"]
    require_activation(seen.get("hidden_act", ACTIVATION))
    side, patch = number(seen, "image_size", 224), number(seen, "patch_size", 16)
    features = number(config, "mm_tokens_per_image", 256)
    patches, rows = side // patch, math.isqrt(features)
    if side % patch or rows**2 != features or patches % rows:
        raise ValueError(f"its pictures of {side} pixels and patches of {patch} do not make {features} features")
    mean, std = colours_of(preprocessor, MEAN, STD)
    return Gemma3Sizes(
        width=number(seen, "hidden_size", 768),
        hidden=number(seen, "intermediate_size", 3072),
        blocks=number(seen, "num_hidden_layers", 12),
        heads=number(seen, "num_attention_heads", 12),
        patch=patch,
        patches=patches,
        pool=patches // rows,
        eps=float(seen.get("layer_norm_eps", 1e-6)),
        output=number(text, "hidden_size", 2304),
        mean=mean,
        std=std,
    )


def require_activation(name: str) -> None:
    if name != ACTIVATION:
        raise ValueError(f"its activation {name} is not {ACTIVATION}")


def format_of(settings: Settings, sizes: Gemma3Sizes) -> Gemma3Format:
    """Raises ValueError if a token is missing, or the size of the pictures is not the tower's."""
    side = sizes.patches * sizes.patch
    size = settings.pictures.get("size") or {"height": side, "width": side}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ValueError(f"the size of its pictures is {size}, and its tower takes {side} x {side} pixels")
    if side**2 > settings.most_pixels:
        raise ValueError(f"its pictures have {side**2:,} pixels, and --max-image-pixels is {settings.most_pixels:,}")
    vocabulary = settings.vocabulary
    if "\n\n" not in vocabulary:
        raise ValueError(r"its tokenizer has no \n\n")
    return Gemma3Format(
        start=token_of(settings, "boi_token", "<start_of_image>"),
        placeholder=token_of(settings, "image_token", "<image_soft_token>"),
        end=token_of(settings, "eoi_token", "<end_of_image>"),
        newlines=vocabulary["\n\n"],
        side=side,
        rows=sizes.patches // sizes.pool,
        joins=joins_of(vocabulary),
        resampling=resampling_of(settings.pictures, "BILINEAR"),
    )


def token_of(settings: Settings, name: str, text: str) -> int:
    """Returns a token that the configuration names by its id, the tokenizer by its text. Raises ValueError."""
    found = settings.config.get(f"{name}_index", settings.config.get(f"{name}_id"))
    return settings.token(text) if found is None else int(found)


def joins_of(vocabulary: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """Returns the tokens of several newlines, by the tokens of two and of the others."""
    joins = {}
    for text, token in vocabulary.items():
        if text and not text.strip("\n") and text + "\n\n" in vocabulary:
            joined = vocabulary[text + "\n\n"]
            joins[token, vocabulary["\n\n"]] = joins[vocabulary["\n\n"], token] = joined
    return joins


GEMMA_3 = Family({"siglip_vision_model", "gemma3", "gemma3_vision"}, name_of, prepare, make)
"""mlx-vlm also knows the types gemma3 and gemma3_vision."""
