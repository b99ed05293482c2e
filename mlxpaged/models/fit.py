"""What of a model fits into this machine's memory: computed from its config.json, before its weights are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map
from mlx_lm.utils import load_model as load_weights

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.weight_names import classes_of
from mlxpaged.models.layer_finder import Way, find_layers
from mlxpaged.models.layers import KV, LayerSpec, PerSequence, kv_layers, leaves, state_bytes

LONGEST = 2**24
"""Tokens; no model has a longer context."""


class Fit(NamedTuple):
    """bytes_per_token: of KV, in layers without a window. tokens: how many fit, in one sequence; at most LONGEST."""

    bytes_per_token: int
    tokens: int


def layers_of(directory: Path) -> list[LayerSpec]:
    """What the layers keep, found as for a loaded model. The weights are zeros that take no memory: the directory needs
    only config.json. Raises UnsupportedModelError if the model cannot be built or run like this."""
    try:
        model, config = load_weights(directory, lazy=True, strict=False, get_model_classes=classes)
        dtype = element_type({**(config.get("text_config") or {}), **config})

        def zeros(weight: mx.array) -> mx.array:
            kind = dtype if mx.issubdtype(weight.dtype, mx.floating) else weight.dtype
            return mx.broadcast_to(mx.zeros((), kind), weight.shape)

        model.update(tree_map(zeros, model.parameters()))
        for way in Way:
            try:
                return find_layers(model, way).specs
            except UnsupportedModelError:
                continue
    except Exception as error:  # mlx-lm's models raise any type without their weights
        raise UnsupportedModelError(f"what its layers keep is not known: {error}") from error
    raise UnsupportedModelError("what its layers keep is not known")


def classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    """The model's classes, without the part that renames weights: it fails if they are missing."""
    model_class, args_class = classes_of(config)

    class WithoutWeights(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return {}

    return WithoutWeights, args_class


def element_type(config: dict[str, Any]) -> mx.Dtype:
    """The type of the activations, and so of the KV cache."""
    name = config.get("dtype") or config.get("torch_dtype")
    return {"float32": mx.float32, "float16": mx.float16}.get(str(name), mx.bfloat16)


def fit(specs: list[LayerSpec], free_bytes: int) -> Fit:
    """free_bytes: what is left beside the weights."""
    per_sequence = [spec for spec in leaves(specs) if isinstance(spec, PerSequence)]
    everywhere = sum(spec.bytes_per_token for spec in per_sequence)
    windows: list[tuple[int, int]] = []  # (tokens, bytes of one)
    for layer in kv_layers(specs):
        if layer.window is None:
            everywhere += token_bytes(layer)
        else:
            windows.append((layer.window, token_bytes(layer)))

    def needed(tokens: int) -> int:
        return everywhere * tokens + sum(size * min(window, tokens) for window, size in windows)

    left = free_bytes - state_bytes(specs)
    low, high = 0, LONGEST
    while low < high:  # the most tokens that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= left else (low, middle - 1)
    return Fit(everywhere, low)


def token_bytes(layer: KV) -> int:
    return layer.kv_layout(block_size=1).bytes_per_token
