"""Lets an unmodified text model see: hooks in its embedding, its rotary embeddings and its first layers."""

from __future__ import annotations

from typing import Any

from mlx.nn.layers.base import Module

from mlxpaged.vision.embedding import add_features, embedding_of, put_features
from mlxpaged.vision.positions import rotate_by_axes
from mlxpaged.vision.tower import Vision


def install(model: Module, vision: Vision) -> None:
    """Modules are changed in place, by their classes. Raises ValueError if the model has not the parts for it."""
    embedding = embedding_of(model)
    if embedding is None:
        raise ValueError("its embedding was not found")
    if vision.axes is not None:
        rotate_by_axes(model, vision.axes, vision.rows)
    if vision.num_deep:
        layers: Any = getattr(model, "layers", ())
        if len(layers) < vision.num_deep:
            raise ValueError(f"it has {len(layers)} layers, and its tower features for {vision.num_deep}")
        add_features(layers[: vision.num_deep], vision.rows)
    put_features(embedding, vision.rows)
