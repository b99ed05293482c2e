"""Parts of a step that one call of a module computes, for modules that do not take all rows at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.core.step import Row


@dataclass
class TokenGroup:
    """Tokens `first` to `last` of a step: rows of `length` tokens each, or a piece of one prompt chunk. Rows have one
    token, or more if they have drafts."""

    first: int
    last: int
    is_rows: bool
    length: int = field(default=1, kw_only=True)

    def select(self, array: Any, num_tokens: int) -> Any:
        """The group's part of an argument with one row per token: [T, 1, ...] -> [B, length, ...] or [1, n, ...];
        offsets [T] -> [B] or [1]. Other arguments are returned as they are."""
        if not isinstance(array, mx.array) or array.ndim == 0 or array.shape[0] != num_tokens:
            return array
        if array.ndim == 1:
            return self.first_tokens(array)
        part = array[self.first : self.last]
        if not self.is_rows:
            return part.swapaxes(0, 1)
        return part if self.length == 1 else part.reshape(-1, self.length, *part.shape[2:])

    def first_tokens(self, array: mx.array) -> mx.array:
        """[T] -> [B] or [1]: of the first token of each row, or of the piece."""
        return array[self.first : self.last : self.length] if self.is_rows else array[self.first : self.first + 1]

    def as_rows(self, array: mx.array) -> mx.array:
        """A result of the module for this group as rows, [n, 1, ...]."""
        if not self.is_rows:
            return array.swapaxes(0, 1)
        return array if self.length == 1 else array.reshape(-1, 1, *array.shape[2:])


@dataclass
class StateGroup(TokenGroup):
    """All decoding rows of a step that have as many tokens, or a piece of one prompt chunk.

    previous: index of the group of the same step whose states these continue, and of the sequence in it. restore: the
    checkpoint that they start from. If both are None, they start from the sequences' own states, or from nothing if the
    group is fresh. taken: (index of the sequence in the group, id) of the checkpoints to take after it. with_drafts:
    its rows if they have drafts.
    """

    sequence_ids: list[int]
    is_fresh: bool = False
    previous: tuple[int, int] | None = None
    restore: int | None = None
    taken: list[tuple[int, int]] = field(default_factory=list)
    with_drafts: list[Row] = field(default_factory=list)


def make_groups(rows: Iterable[Row], stack: bool = True) -> list[StateGroup]:
    """The calls of a step, in the order of its tokens. The leading rows that decode and continue a sequence are called
    together if `stack`, neighbours with as many tokens in one group. Every other row is alone, and cut at its
    checkpoints. Rows with drafts have none."""
    groups: list[StateGroup] = []
    taken_by: dict[int, tuple[int, int]] = {}  # checkpoint -> the group of this step that takes it, and the sequence
    first = 0
    for row in rows:
        last = first + row.num_tokens
        decodes = (row.num_tokens == 1 or bool(row.drafts)) and row.start > 0 and row.restore is None
        if stack and decodes and (not groups or groups[-1].is_rows):
            if not groups or groups[-1].length != row.num_tokens:
                groups.append(StateGroup(first, last, True, [], length=row.num_tokens))
            group = groups[-1]
            for _, checkpoint in row.checkpoints:
                taken_by[checkpoint] = len(groups) - 1, len(group.sequence_ids)
                group.taken.append((len(group.sequence_ids), checkpoint))
            group.sequence_ids.append(row.sequence_id)
            group.last = last
            if group.length > 1:
                group.with_drafts.append(row)
        else:
            begin = StateGroup(first, last, False, [row.sequence_id], is_fresh=row.start == 0, restore=row.restore)
            begin.previous = None if row.restore is None else taken_by.get(row.restore)
            begin.with_drafts = [row] if row.drafts else []
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
