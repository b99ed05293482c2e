"""What is different between the towers of several families of models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.vision import MOST_PIXELS
from mlxpaged.vision.image import Resampling
from mlxpaged.vision.tower import Vision

MOST = {
    "hidden_size": 2**14,
    "embed_dim": 2**14,
    "mlp_ratio": 64,
    "out_hidden_size": 2**16,
    "intermediate_size": 2**16,
    "num_hidden_layers": 200,
    "depth": 200,
    "num_attention_heads": 256,
    "num_heads": 256,
    "patch_size": 256,
    "spatial_merge_size": 16,
    "num_position_embeddings": 2**20,
    "window_size": 2**14,
    "image_size": 2**12,
    "head_dim": 2**10,
    "num_key_value_heads": 256,
    "position_embedding_size": 2**20,
    "pooling_kernel_size": 16,
    "max_soft_tokens": 2**14,
    "mm_embed_dim": 2**16,
    "mm_posemb_size": 2**20,
    "mm_tokens_per_image": 2**14,
    "vision_soft_tokens_per_image": 2**14,
    "max_patches": 64,
    "num_patches": 2**20,
    "downsample_factor": 16,
    "projector_hidden_size": 2**16,
    "min_image_tokens": 2**20,
    "max_image_tokens": 2**20,
    "merge_size": 16,
    "patch_temporal": 16,
    "temporal_patch_size": 16,
    "min_tiles": 64,
    "max_tiles": 64,
    "tile_size": 2**12,
    "init_pos_emb_height": 2**10,
    "init_pos_emb_width": 2**10,
    "in_token_limit": 2**20,
    "in_patch_limit": 2**20,
    "patch_limit_on_one_side": 2**14,
}
"""Far above those of any model. A tower of a damaged directory is not even begun."""


PIXEL = 1 / 255
"""The factor of a pixel's values."""


def number(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a size that a configuration has. Raises ValueError if it is not a whole number from 1 to MOST."""
    found = values.get(name, default)
    if type(found) is not int or not 1 <= found <= MOST[name]:
        raise ValueError(f"its {name} is {str(found)[:100]}")
    return found


@dataclass(frozen=True)
class Settings:
    """The files of a model's directory. config: config.json. images, prompts: how its processor makes these.
    vocabulary: ids of tokens by their texts. most_pixels: of an image, whatever the files say."""

    config: Mapping[str, Any]
    images: Mapping[str, Any]
    prompts: Mapping[str, Any]
    vocabulary: Mapping[str, int]
    most_pixels: int = MOST_PIXELS

    def token(self, text: str, *names: str) -> int:
        """Returns the id that config.json has under one of these names, else that of the text. Raises ValueError if the
        vocabulary has no such token."""
        found = next((self.config[name] for name in names if self.config.get(name) is not None), None)
        if found is not None:
            return int(found)
        if text not in self.vocabulary:
            raise ValueError(f"its tokenizer has no {text}")
        return self.vocabulary[text]


class Family(NamedTuple):
    """kinds: model types of its vision_config. name_of: the name in the tower of a weight in a file, whose name is
    without `model.` at the beginning; None for another part's. make: makes the tower, without its weights; it raises
    ValueError, KeyError or TypeError. prepare: changes stored weights in place."""

    kinds: Collection[str]
    name_of: Callable[[str], str | None]
    make: Callable[[Settings], tuple[Vision, Module]]
    prepare: Callable[[dict[str, mx.array]], None] = lambda stored: None


def colours_of(
    images: Mapping[str, Any], default_mean: tuple[float, ...], default_std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and the standard deviation of red, green and blue, from 0 to 1. Raises ValueError."""
    factor = images.get("rescale_factor", PIXEL)
    if images.get("do_rescale", True) is not True or not isinstance(factor, float) or abs(factor - PIXEL) > 1e-6:
        raise ValueError("its pixels are not divided by 255")
    if images.get("do_normalize", True) is not True:
        return (0.0,) * len(default_mean), (1.0,) * len(default_std)
    mean, std = (
        tuple(float(each) for each in images.get(name) or default)
        for name, default in (("image_mean", default_mean), ("image_std", default_std))
    )
    if len(mean) != len(default_mean) or len(std) != len(default_std) or min(std) <= 0:
        raise ValueError(f"its pixels cannot be normalized by the mean {mean} and the deviation {std}")
    return mean, std


RESAMPLINGS: Mapping[int, Resampling] = {1: "LANCZOS", 2: "BILINEAR", 3: "BICUBIC"}
"""Filters by their numbers in Pillow, which the files have."""


def resampling_of(images: Mapping[str, Any], default: Resampling) -> Resampling:
    """Raises ValueError."""
    found = images.get("resample")
    if found is not None and found not in RESAMPLINGS:
        raise ValueError(f"its resample is {str(found)[:100]}")
    return default if found is None else RESAMPLINGS[found]


def flatten_convolution(stored: dict[str, mx.array], name: str) -> None:
    """Makes a convolution by steps of its own width a linear layer of whole patches, in place."""
    patches = stored.get(name)
    if patches is not None and patches.ndim == 4:
        if patches.shape[2] == patches.shape[3] != patches.shape[1]:  # torch's layout, [width, colours, side, side]
            patches = patches.transpose(0, 2, 3, 1)
        stored[name] = patches.flatten(1)
