"""A small model that drafts for a larger one with the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import KV, LayerSpec, leaves

if TYPE_CHECKING:
    from mlxpaged.models.loader import ServedModel


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
        self.rows.rows = mx.array(list(wanted))
        known = mx.minimum(tokens, self.own_size - 1)
        try:
            logits: mx.array = self.model(known[:, None], cache=list(caches[-len(self.layers) :]))
        finally:
            self.rows.rows = None
        return logits[:, -1, : self.vocab_size]


def draft_model(draft: ServedModel, served: ServedModel) -> DraftModel:
    """Raises UnsupportedModelError, with the reason, if a loaded model cannot draft for another one."""
    reason = ""
    if draft.tokenizer.reader.get_vocab() != served.tokenizer.reader.get_vocab():
        reason = f"its vocabulary is not that of {served.name}"
    elif not all(isinstance(spec, KV) for spec in leaves(draft.layers)):
        reason = "its layers keep more than keys and values"
    elif draft.rows is None:
        reason = "its output head is not found"
    if reason or draft.rows is None:
        raise UnsupportedModelError(f"{draft.name} cannot draft: {reason}")
    sizes = draft.vocab_size, served.vocab_size, draft.weight_bytes
    return DraftModel(draft.name, draft.model, draft.rows, draft.layers, *sizes)
