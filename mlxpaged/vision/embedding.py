"""Puts features of images in place of rows of the embedding, in an unmodified text model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class FeatureRows:
    """What the running step has of images; all arrays are None in a step without any.

    where[n]: the tokens that are rows of images. features[n, D], or [n, 1 + layers, D]. positions[3, T]: of all
    tokens, if the model rotates by three axes. part: returns the first token of the step that the model computes now,
    and the one after the last; None if it computes all of them at once.
    """

    def __init__(self) -> None:
        self.part: Callable[[], tuple[int, int] | None] = lambda: None
        self.clear()

    def clear(self) -> None:
        self.where: mx.array | None = None
        self.features: mx.array | None = None
        self.positions: mx.array | None = None

    def show(self, where: mx.array, features: mx.array, positions: mx.array | None) -> None:
        self.where, self.features, self.positions = where, features, positions

    def put_into(self, embedded: mx.array) -> mx.array:
        """Returns embedded[T, 1, D] or [1, T, D] with the features in its rows of images."""
        if self.where is None or self.features is None:
            return embedded
        rows = embedded.reshape(-1, embedded.shape[-1])
        features = self.features if self.features.ndim == 2 else self.features[:, 0]
        features = features.astype(embedded.dtype)
        part = self.part()
        if part is None:
            rows[self.where] = features
        else:  # the model runs once per sequence: features of other sequences go to a row that is dropped
            first, last = part
            within = (self.where >= first) & (self.where < last)
            rows = mx.concatenate([rows, rows[:1]])
            rows[mx.where(within, self.where - first, len(rows) - 1)] = features
            rows = rows[:-1]
        return rows.reshape(embedded.shape)

    def add_to(self, output: mx.array, layer: int) -> mx.array:
        """Returns the output of a layer, [T, 1, D] or [1, T, D], with that layer's features added."""
        if self.where is None or self.features is None:
            return output
        rows = output.reshape(-1, output.shape[-1])
        rows = rows.at[self.where].add(self.features[:, 1 + layer].astype(output.dtype))
        return rows.reshape(output.shape)


def embedding_of(model: Module) -> Module | None:
    """Returns the embedding of a text model's tokens; None if it is not where mlx-lm's models have it."""
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == "embed_tokens"]
    return found[0] if len(found) == 1 else None


def put_features(embedding: Any, rows: FeatureRows) -> None:
    """Makes the embedding put `rows` into its result. Its weights, and its use as a tied head, remain."""
    base = type(embedding)

    def embed(self: Any, token_ids: mx.array) -> mx.array:
        return rows.put_into(base.__call__(self, token_ids))

    embedding.__class__ = type(base.__name__, (base,), {"__call__": embed})


def add_features(layers: Sequence[Any], rows: FeatureRows) -> None:
    """Makes the first layers add their features to their outputs."""
    for number, layer in enumerate(layers):
        add_to_output(layer, number, rows)


def add_to_output(layer: Any, number: int, rows: FeatureRows) -> None:
    base = type(layer)

    def run(self: Any, *args: Any, **more: Any) -> mx.array:
        return rows.add_to(base.__call__(self, *args, **more), number)

    layer.__class__ = type(base.__name__, (base,), {"__call__": run})
