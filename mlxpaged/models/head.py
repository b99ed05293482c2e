"""The output head: only rows that are sampled from are projected to the vocabulary.

An unmodified model projects every row. For a prefill of 2,048 tokens it would multiply 2,048 rows by a vocabulary of
150,000 words, though one row is needed. So the module of the final projection is changed to select rows first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

logger = logging.getLogger(__name__)


class RowSelection:
    """The rows of the running step that the output head projects; None means all. is_projecting: during its call.
    project: the output head, of so many outputs. hidden[T, 1, D]: its last input, all rows of it, if it is kept."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.is_projecting = False
        self._keeps_hidden = False
        self.hidden: mx.array | None = None
        self.project: Callable[[mx.array], mx.array] = lambda hidden: hidden
        self.num_outputs = 0

    @contextmanager
    def selecting(self, rows: mx.array) -> Iterator[None]:
        """The head projects these rows only while the context lasts."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def keep_hidden(self, keeps: bool) -> None:
        """From now on the last input is kept, or is not."""
        self._keeps_hidden = keeps

    def take_hidden(self) -> mx.array | None:
        """Returns the last input, which is not kept any longer."""
        hidden, self.hidden = self.hidden, None
        return hidden

    def __call__(self, hidden: mx.array) -> mx.array:
        if self._keeps_hidden:
            self.hidden = hidden
        return hidden if self.rows is None else hidden[self.rows]


def select_rows_before_head(
    model: Module, sizes: Collection[int], works: Callable[[RowSelection], bool]
) -> RowSelection | None:
    """Make the model's output head select rows of its input first. Returns None if no head is found.

    The head is a linear layer with as many outputs as one of `sizes`, or the embedding that is tied to it. Other layers
    can have such a size too, so each candidate is tried: `works` runs the model and returns whether it was the head.
    """
    sized = [module for _, module in model.named_modules() if getattr(module, "weight", None) is not None]
    sized = [module for module in sized if module.weight.ndim == 2 and module.weight.shape[0] in sizes]
    for head in sorted(sized, key=lambda module: hasattr(module, "as_linear")):
        original, selection = type(head), RowSelection()
        _subclass_in_place(head, "as_linear" if hasattr(head, "as_linear") else "__call__", selection)
        if works(selection):
            return selection
        head.__class__ = original
    logger.warning("no output head found: every row is projected to the vocabulary")
    return None


def _subclass_in_place(head: Any, method: str, selection: RowSelection) -> None:
    """Override `method` of this module only. Its weights, its path in the parameter tree and its type remain."""
    base = type(head)

    def project(self: Any, hidden: mx.array) -> mx.array:
        selection.is_projecting = True
        try:
            return getattr(base, method)(self, selection(hidden))  # type: ignore[no-any-return]
        finally:
            selection.is_projecting = False

    head.__class__ = type(base.__name__, (base,), {method: project})
    selection.num_outputs = head.weight.shape[0]
    selection.project = lambda hidden: getattr(base, method)(head, hidden)
