"""Parts of a step that one call of a module computes, for modules that do not take all rows at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.step import Row


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


@dataclass
class StateGroup(TokenGroup):
    """All decoding rows of a step, one token each, or a piece of one prompt chunk.

    previous: index of the group of the same step whose states these continue, and of the sequence in it. restore: the
    checkpoint that they start from. If both are None, they start from the sequences' own states, or from nothing if the
    group is fresh. taken: (index of the sequence in the group, id) of the checkpoints to take after it.
    """

    sequence_ids: list[int]
    is_fresh: bool = False
    previous: tuple[int, int] | None = None
    restore: int | None = None
    taken: list[tuple[int, int]] = field(default_factory=list)


def make_groups(rows: Iterable[Row], stack: bool = True) -> list[StateGroup]:
    """The calls of a step, in the order of its tokens. The leading rows of one token that continue a sequence decode
    together if `stack`. Every other row is alone, and cut at its checkpoints."""
    groups: list[StateGroup] = []
    taken_by: dict[int, tuple[int, int]] = {}  # checkpoint -> the group of this step that takes it, and the sequence
    first = 0
    for row in rows:
        last = first + row.num_tokens
        decodes = stack and row.num_tokens == 1 and row.start > 0 and row.restore is None
        if decodes and (not groups or (len(groups) == 1 and groups[0].is_rows)):
            if not groups:
                groups.append(StateGroup(first, last, True, []))
            for _, checkpoint in row.checkpoints:
                taken_by[checkpoint] = 0, len(groups[0].sequence_ids)
                groups[0].taken.append((len(groups[0].sequence_ids), checkpoint))
            groups[0].sequence_ids.append(row.sequence_id)
            groups[0].last = last
        else:
            begin = StateGroup(first, last, False, [row.sequence_id], is_fresh=row.start == 0, restore=row.restore)
            begin.previous = None if row.restore is None else taken_by.get(row.restore)
            groups.append(begin)
            for position, checkpoint in row.checkpoints:
                end = first + position - row.start
                groups[-1].last = end
                groups[-1].taken = [(0, checkpoint)]
                taken_by[checkpoint] = len(groups) - 1, 0
                if end < last:
                    groups.append(StateGroup(end, last, False, [row.sequence_id], previous=(len(groups) - 1, 0)))
        first = last
    return groups


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
