"""A small model that drafts for a larger one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import LayerSpec


@dataclass(frozen=True)
class DraftModel:
    """own_size: its logits. vocab_size: those of the larger model. Either may have more unused ones at the end."""

    name: str
    model: Module
    rows: RowSelection
    layers: list[LayerSpec]
    own_size: int
    vocab_size: int
    nbytes: int

    def __call__(self, tokens: mx.array, wanted: Sequence[int], caches: Sequence[Any]) -> mx.array:
        """Logits [W, V] after the tokens [T] at these indices. caches: the last ones are its own. A token that only the
        larger model has becomes the last one: MLX reads beyond the embedding for it."""
        known = mx.minimum(tokens, self.own_size - 1)
        with self.rows.selecting(mx.array(list(wanted))):
            logits: mx.array = self.model(known[:, None], cache=list(caches[-len(self.layers) :]))
        return logits[:, -1, : self.vocab_size]
