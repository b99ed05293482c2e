"""Puts features of pictures in place of rows of the embedding, in an unmodified text model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module


class FeatureRows:
    """The rows of pictures in the running step: features[n, D] in place of the rows where[n] of the embedding. None in
    a step without any."""

    def __init__(self) -> None:
        self.where: mx.array | None = None
        self.features: mx.array | None = None

    def put_into(self, embedded: mx.array) -> mx.array:
        """Returns embedded[T, 1, D] or [1, T, D] with the rows of pictures."""
        if self.where is None or self.features is None:
            return embedded
        rows = embedded.reshape(-1, embedded.shape[-1])
        rows[self.where] = self.features.astype(embedded.dtype)
        return rows.reshape(embedded.shape)


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
