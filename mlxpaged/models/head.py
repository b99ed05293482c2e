"""The output head: only the rows that are sampled from are multiplied by the vocabulary.

An unmodified model projects every row it is given, and a 2,048-token prefill would meet a 150,000-word vocabulary 2,048
times for one wanted row. The module that does the final projection is found by its size and made to pick rows first.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

logger = logging.getLogger(__name__)

PROJECTIONS = ("as_linear", "__call__")


class RowSelection:
    """Which rows of the running step reach the output head; all of them while unset."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden if self.rows is None else hidden[self.rows]


def select_rows_before_head(model: Module, vocab_size: int) -> RowSelection | None:
    """Make the model's output head pick rows of its input first. None where no head could be told for sure.

    The head is the linear layer with `vocab_size` outputs, or else the embedding whose transpose is used instead.
    """
    sized = [module for _, module in model.named_modules() if getattr(module, "weight", None) is not None]
    sized = [module for module in sized if module.weight.ndim == 2 and module.weight.shape[0] == vocab_size]
    embeddings = [module for module in sized if hasattr(module, "as_linear")]
    linears = [module for module in sized if not hasattr(module, "as_linear")]
    heads = linears or embeddings
    if len(heads) != 1:
        logger.warning("no single output head found (%d candidates): every row is projected", len(heads))
        return None
    selection = RowSelection()
    _subclass_in_place(heads[0], "as_linear" if not linears else "__call__", selection)
    return selection


def _subclass_in_place(head: Any, method: str, selection: RowSelection) -> None:
    """Override `method` of this one module. Its place in the parameter tree, its weights and its type checks remain."""
    base = type(head)

    def project(self: Any, hidden: mx.array) -> mx.array:
        return getattr(base, method)(self, selection(hidden))  # type: ignore[no-any-return]

    head.__class__ = type(base.__name__, (base,), {method: project})
