"""The output head: only the rows that are sampled from are multiplied by the vocabulary.

An unmodified model projects every row it is given, and a 2,048-token prefill would meet a 150,000-word vocabulary 2,048
times for one wanted row. The module that does the final projection is found and made to pick rows first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

logger = logging.getLogger(__name__)


class RowSelection:
    """Which rows of the running step reach the output head; all of them while unset."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden if self.rows is None else hidden[self.rows]


def select_rows_before_head(
    model: Module, vocab_size: int, works: Callable[[RowSelection], bool]
) -> RowSelection | None:
    """Make the model's output head pick rows of its input first. None where no head is found.

    The head is a linear layer with `vocab_size` outputs, or else the embedding whose transpose is used instead. Other
    layers can have that size too, so each candidate is tried: `works` runs the model and says whether it was the head.
    """
    sized = [module for _, module in model.named_modules() if getattr(module, "weight", None) is not None]
    sized = [module for module in sized if module.weight.ndim == 2 and module.weight.shape[0] == vocab_size]
    for head in sorted(sized, key=lambda module: hasattr(module, "as_linear")):
        original, selection = type(head), RowSelection()
        _subclass_in_place(head, "as_linear" if hasattr(head, "as_linear") else "__call__", selection)
        if works(selection):
            return selection
        head.__class__ = original
    logger.warning("no output head found: every row is projected to the vocabulary")
    return None


def _subclass_in_place(head: Any, method: str, selection: RowSelection) -> None:
    """Override `method` of this one module. Its place in the parameter tree, its weights and its type checks remain."""
    base = type(head)

    def project(self: Any, hidden: mx.array) -> mx.array:
        return getattr(base, method)(self, selection(hidden))  # type: ignore[no-any-return]

    head.__class__ = type(base.__name__, (base,), {method: project})
