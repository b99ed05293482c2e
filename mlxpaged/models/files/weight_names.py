"""Lets mlx-lm load models of mlx-vlm, and models whose weights have names that its modules do not know."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import deepseek_v3
from mlx_lm.utils import load_model

from mlxpaged.models.files.architectures import MODULES, Source, source_of
from mlxpaged.models.files.transformers_fields import add_earlier_fields
from mlxpaged.models.text_mlx_vlm import BorrowedConfig, BorrowedModel

Weights = dict[str, mx.array]

Classes = Callable[[dict[str, Any]], tuple[type[Module], type]]

known_classes: Classes = inspect.signature(load_model).parameters["get_model_classes"].default
"""mlx-lm's function from a config to the classes of the model and of its arguments."""

TEXT = "language_model."


def classes_of(config: dict[str, Any]) -> tuple[type[Module], type]:
    """Returns the classes of the model and of its arguments, for mlx-lm's `load_model`, which makes the arguments of
    this config afterwards."""
    kind = str(config.get("model_type"))
    if source_of(config) is Source.MLX_VLM:
        return BorrowedModel, BorrowedConfig
    add_earlier_fields(config)
    model_class, args_class = known_classes({**config, "model_type": MODULES.get(kind, kind)})
    if kind not in RENAMED:
        return model_class, args_class
    rename = RENAMED[kind]

    class Renaming(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: Weights) -> Weights:
            known: Weights = super().sanitize(rename(self, weights))
            return known

    return Renaming, args_class


def as_mlx_vlm(model: Any, weights: Weights) -> Weights:
    """transformers has the text model at `model.language_model`, without a `model` within it, and convolutions of its
    own layout."""
    of_text, others = {}, {}
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        if name.startswith(TEXT):
            of_text["model." + name.removeprefix(TEXT).removeprefix("model.")] = weight
        elif name != "lm_head.weight":  # that of the embedding
            others[name] = weight
    return others | {TEXT + name: weight for name, weight in model.language_model.sanitize(of_text).items()}


def with_split_projections(model: Any, weights: Weights) -> Weights:
    """Kimi-VL's files have one projection of latents to keys and values, as DeepSeek's have."""
    of_text = {name.removeprefix(TEXT): weight for name, weight in weights.items() if name.startswith(TEXT)}
    others = {name: weight for name, weight in weights.items() if not name.startswith(TEXT)}
    split: Weights = deepseek_v3.Model.sanitize(model.language_model, of_text)
    return others | {TEXT + name: weight for name, weight in split.items()}


def without_vision(model: Any, weights: Weights) -> Weights:
    """mlx-lm drops the tower of Muse Glimmer from converted weights, and refuses published ones, which have it at
    `model.vision_tower`."""
    return {name: weight for name, weight in weights.items() if not name.startswith("model.vision_")}


def without_draft_head(model: Any, weights: Weights) -> Weights:
    """mlx-lm drops the draft head from published weights of Qwen3-Next, and refuses converted ones that have it."""
    return {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}


RENAMED: Mapping[str, Callable[[Any, Weights], Weights]] = {
    "lfm2_vl": as_mlx_vlm,
    "lfm2-vl": as_mlx_vlm,
    "kimi_vl": with_split_projections,
    "muse_glimmer": without_vision,
    "qwen3_next": without_draft_head,
}
"""What makes the weights those of mlx-lm's module, by model type."""
