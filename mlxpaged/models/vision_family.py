"""What is different between the towers of several families of models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.vision.tower import Vision


@dataclass(frozen=True)
class Settings:
    """The files of a model's directory. config: config.json. pictures, prompts: how its processor makes these.
    vocabulary: ids of tokens by their texts."""

    config: Mapping[str, Any]
    pictures: Mapping[str, Any]
    prompts: Mapping[str, Any]
    vocabulary: Mapping[str, int]

    def token(self, text: str) -> int:
        """Raises ValueError if the vocabulary has no such token."""
        if text not in self.vocabulary:
            raise ValueError(f"its tokenizer has no {text}")
        return self.vocabulary[text]


class Family(NamedTuple):
    """kinds: model types of its vision_config. name_of: the name in the tower of a weight in a file, whose name is
    without `model.` at the beginning; None for another part's. prepare: changes stored weights in place. make: makes
    the tower, without its weights; it raises ValueError, KeyError or TypeError."""

    kinds: Collection[str]
    name_of: Callable[[str], str | None]
    prepare: Callable[[dict[str, mx.array]], None]
    make: Callable[[Settings], tuple[Vision, Module]]


def colours_of(
    pictures: Mapping[str, Any], default_mean: tuple[float, ...], default_std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and the standard deviation of red, green and blue. Raises ValueError."""
    mean, std = (
        tuple(float(each) for each in pictures.get(name) or default)
        for name, default in (("image_mean", default_mean), ("image_std", default_std))
    )
    if len(mean) != len(default_mean) or len(std) != len(default_std) or min(std) <= 0:
        raise ValueError(f"its pixels cannot be normalized by the mean {mean} and the deviation {std}")
    return mean, std
