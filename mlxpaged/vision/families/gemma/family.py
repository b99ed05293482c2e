"""Makes the towers of Gemma 3 and Gemma 4 by a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx

from mlxpaged.vision.families.gemma.format import Gemma3Format, Gemma4Format
from mlxpaged.vision.families.gemma.gemma3 import MEAN, STD, Gemma3Sizes, Gemma3Tower
from mlxpaged.vision.families.gemma.gemma4 import Gemma4Sizes, Gemma4Tower
from mlxpaged.vision.families.gemma.gemma4_unified import MEAN as UNIFIED_MEAN
from mlxpaged.vision.families.gemma.gemma4_unified import STD as UNIFIED_STD
from mlxpaged.vision.families.gemma.gemma4_unified import Gemma4UnifiedSizes, Gemma4UnifiedTower
from mlxpaged.vision.family import Family, Settings, colours_of, flatten_convolution, number, resampling_of
from mlxpaged.vision.tower import Vision

ACTIVATION = "gelu_pytorch_tanh"

SMALL_ROWS, SMALL_PARTS = 2, 6
"""Rows and columns of features of the probe's image in Gemma 3, and its rows of features in Gemma 4."""

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
    """Every token of an image sees all of its others, in all layers (Gemma3Model of transformers)."""
    sizes = sizes_of(settings.config, settings.images)
    tower = Gemma3Tower(sizes)
    form = format_of(settings, sizes)
    rows = min(form.rows, SMALL_ROWS)
    small = replace(form, side=rows * sizes.pool * sizes.patch, rows=rows)
    return Vision(form, tower, mutual="all", small=small), tower


def sizes_of(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma3Sizes:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    seen, text = config["vision_config"], config["text_config"]
    require_activation(seen.get("hidden_act", ACTIVATION))
    side, patch = number(seen, "image_size", 224), number(seen, "patch_size", 16)
    features = number(config, "mm_tokens_per_image", 256)
    patches, rows = side // patch, math.isqrt(features)
    if side % patch or rows**2 != features or patches % rows:
        raise ValueError(f"its images of {side} pixels and patches of {patch} do not make {features} features")
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
    """Raises ValueError if a token is missing, or the size of the images is not the tower's."""
    side = sizes.patches * sizes.patch
    size = settings.images.get("size") or {"height": side, "width": side}
    if (size.get("height"), size.get("width")) != (side, side):
        raise ValueError(f"the size of its images is {size}, and its tower takes {side} x {side} pixels")
    if side**2 > settings.most_pixels:
        raise ValueError(f"its images have {side**2:,} pixels, and --max-image-pixels is {settings.most_pixels:,}")
    vocabulary = settings.vocabulary
    if "\n\n" not in vocabulary:
        raise ValueError(r"its tokenizer has no \n\n")
    return Gemma3Format(
        start=settings.token("<start_of_image>", *names_of("boi_token")),
        placeholder=settings.token("<image_soft_token>", *names_of("image_token")),
        end=settings.token("<end_of_image>", *names_of("eoi_token")),
        newlines=vocabulary["\n\n"],
        side=side,
        rows=sizes.patches // sizes.pool,
        joins=joins_of(vocabulary),
        resampling=resampling_of(settings.images, "BILINEAR"),
    )


def names_of(token: str) -> tuple[str, str]:
    """The names that config.json may have for a token's id."""
    return f"{token}_index", f"{token}_id"


def joins_of(vocabulary: Mapping[str, int]) -> dict[tuple[int, int], int]:
    """Returns the tokens of several newlines, by the tokens of two and of the others."""
    joins = {}
    for text, token in vocabulary.items():
        if text and not text.strip("\n") and text + "\n\n" in vocabulary:
            joined = vocabulary[text + "\n\n"]
            joins[token, vocabulary["\n\n"]] = joins[vocabulary["\n\n"], token] = joined
    return joins


GEMMA_3 = Family({"siglip_vision_model", "gemma3", "gemma3_vision"}, name_of, make, prepare)
"""mlx-vlm also knows the types gemma3 and gemma3_vision."""


PARTS_4 = (
    "vision_tower.patch_embedder.",
    "vision_tower.encoder.layers.",
    "vision_tower.std_",
    "embed_vision.embedding_projection.",
)


def name_of_4(name: str) -> str | None:
    return name if name.startswith(PARTS_4) else None


def make_4(settings: Settings) -> tuple[Vision, Gemma4Tower]:
    sizes = sizes_of_4(settings.config, settings.images)
    tower = Gemma4Tower(sizes)
    image_format = format_of_4(settings, sizes.patch, sizes.pool)
    require_places(sizes.places, image_format.most * sizes.pool)
    mutual = mutual_of(settings.config["text_config"])
    return Vision(image_format, tower, mutual=mutual, small=small_of_4(image_format)), tower


def sizes_of_4(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Gemma4Sizes:
    """What is left out has the value that transformers takes. Raises ValueError, KeyError or TypeError."""
    seen, text = config["vision_config"], config["text_config"]
    require_activation(seen.get("hidden_activation", ACTIVATION))
    heads, head = number(seen, "num_attention_heads", 12), number(seen, "head_dim", 64)
    if number(seen, "num_key_value_heads", 12) != heads or head % 4:
        raise ValueError(f"its {heads} heads of {head} have {seen.get('num_key_value_heads', 12)} of keys and values")
    rope = seen.get("rope_parameters") or {}
    mean, std = colours_of_4(preprocessor)
    return Gemma4Sizes(
        width=number(seen, "hidden_size", 768),
        hidden=number(seen, "intermediate_size", 3072),
        blocks=number(seen, "num_hidden_layers", 16),
        heads=heads,
        head=head,
        patch=number(seen, "patch_size", 16),
        places=number(seen, "position_embedding_size", 10_240),
        pool=number(seen, "pooling_kernel_size", 3),
        rope_base=float(rope.get("rope_theta", 100.0)),
        eps=float(seen.get("rms_norm_eps", 1e-6)),
        clipped=bool(seen.get("use_clipped_linears", False)),
        standardized=bool(seen.get("standardize", False)),
        output=number(text, "hidden_size", 2304),
        mean=mean,
        std=std,
    )


def colours_of_4(images: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The tower brings colours from -1 to 1 itself, after the processor has normalized them if it does so at all."""
    if not images.get("do_normalize", False):
        return MEAN, STD
    mean, std = colours_of(images, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return tuple(m + 0.5 * s for m, s in zip(mean, std, strict=True)), tuple(0.5 * s for s in std)


def format_of_4(settings: Settings, patch: int, pool: int) -> Gemma4Format:
    """Raises ValueError if a token is missing, or the images' patches are not the tower's."""
    images, side = settings.images, patch * pool
    if (images.get("patch_size", patch), images.get("pooling_kernel_size", pool)) != (patch, pool):
        raise ValueError(f"its tower takes patches of {patch} pixels, in squares of {pool} x {pool}")
    most = min(number(images, "max_soft_tokens", 280), settings.most_pixels // side**2)
    if most == 0:
        raise ValueError(f"--max-image-pixels {settings.most_pixels:,} is less than a token's {side**2:,}")
    return Gemma4Format(
        start=settings.token("<|image>", *names_of("boi_token")),
        placeholder=settings.token("<|image|>", *names_of("image_token")),
        end=settings.token("<image|>", *names_of("eoi_token")),
        side=side,
        most=most,
        resampling=resampling_of(images, "BICUBIC"),
    )


def small_of_4(form: Gemma4Format) -> Gemma4Format:
    return replace(form, most=min(form.most, SMALL_PARTS))


def require_places(places: int, most: int) -> None:
    """Raises ValueError if an image may have more patches in a row than there are embeddings of places."""
    if most > places:
        raise ValueError(f"its images have up to {most} patches in a row, and its tower embeds {places}")


def mutual_of(text: Mapping[str, Any], default: str | None = None) -> Literal["none", "windows"]:
    """Raises ValueError if the text model is not one that sees images as Gemma4Model of transformers does."""
    mutual = text.get("use_bidirectional_attention", default)
    if mutual not in (None, "vision"):
        raise ValueError(f"its use_bidirectional_attention is {mutual}")
    if text.get("hidden_size_per_layer_input", 256) and text.get("pad_token_id", 0) != 0:
        # A step has token 0 in place of images, and layers have inputs by tokens.
        raise ValueError(f"its images have the inputs of token {text['pad_token_id']} in its layers")
    return "windows" if mutual == "vision" else "none"


GEMMA_4 = Family({"gemma4_vision", "gemma4"}, name_of_4, make_4)


def name_of_unified(name: str) -> str | None:
    """The module of transformers has all parts under embed_vision, the files of Google have not."""
    name = name.replace("embed_vision.multimodal_embedder.", "embed_vision.", 1)
    for part in ("embed_vision.patch_", "embed_vision.pos_"):
        if name.startswith(part):
            name = name.replace("embed_vision.", "vision_embedder.", 1)
    return name if name.startswith(("vision_embedder.", "embed_vision.embedding_projection.")) else None


def make_unified(settings: Settings) -> tuple[Vision, Gemma4UnifiedTower]:
    config = settings.config
    seen, text = config["vision_config"], config["text_config"]
    patch, pool = number(seen, "patch_size", 16), number(seen, "pooling_kernel_size", 3)
    normalized = settings.images if settings.images.get("do_normalize", False) else {}
    mean, std = colours_of(normalized, UNIFIED_MEAN, UNIFIED_STD)
    sizes = Gemma4UnifiedSizes(
        width=number(seen, "mm_embed_dim", 3840),
        patch=patch * pool,
        places=number(seen, "mm_posemb_size", 1120),
        eps=float(seen.get("rms_norm_eps", 1e-6)),
        output=number(text, "hidden_size", 2304),
        mean=mean,
        std=std,
    )
    image_format = format_of_4(settings, patch, pool)
    require_places(sizes.places, image_format.most)
    tower = Gemma4UnifiedTower(sizes)
    mutual = mutual_of(text, default="vision")
    return Vision(image_format, tower, mutual=mutual, small=small_of_4(image_format)), tower


GEMMA_4_UNIFIED = Family({"gemma4_unified_vision", "gemma4_unified"}, name_of_unified, make_unified)
