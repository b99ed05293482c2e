"""Parts of a step that one call of a module computes, for modules that do not take all rows at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx


@dataclass
class TokenGroup:
    """Tokens `first` to `last` of a step: rows of one token each, or a piece of one prompt chunk."""

    first: int
    last: int
    is_rows: bool

    def select(self, array: Any, num_tokens: int) -> Any:
        """The group's part of an argument with one row per token: [T, 1, ...] -> [B, 1, ...] or [1, n, ...]; offsets
        [T] -> [B] or [1]. Other arguments are returned as they are."""
        if not isinstance(array, mx.array) or array.ndim == 0 or array.shape[0] != num_tokens:
            return array
        if array.ndim == 1:
            return array[self.first : self.last if self.is_rows else self.first + 1]
        part = array[self.first : self.last]
        return part if self.is_rows else part.swapaxes(0, 1)

    def as_rows(self, array: mx.array) -> mx.array:
        """A result of the module for this group as rows, [n, 1, ...]."""
        return array if self.is_rows else array.swapaxes(0, 1)


class Masks(NamedTuple):
    """The masks for the groups of a step. A model asks for masks before its layers run."""

    by_group: list[Any]


running: TokenGroup | None = None
"""The group that a module computes now; None if it takes all rows of the step. All steps run on one thread."""


@contextlib.contextmanager
def running_group(group: TokenGroup) -> Iterator[None]:
    """Until the end of the context, modules compute this group."""
    global running
    before, running = running, group
    try:
        yield
    finally:
        running = before
