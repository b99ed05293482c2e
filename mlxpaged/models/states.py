"""The recurrent states of a model's layers: those of the running sequences, and checkpoints of earlier positions.

A state-space or linear-attention layer keeps one state of fixed size per sequence instead of keys and values per token.
mlx-lm stores it in an ArraysCache: a few arrays whose first axis is the batch. Here the states of all decoding
sequences stay stacked on that axis, so that a decode step copies none. They are permuted only when the batch changes.

MLX arrays are immutable. So a checkpoint is a reference to a state, and a step whose forward pass fails changes none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

State = list[mx.array | None]
"""The arrays of one layer, [n, ...] each for n sequences. An entry that the layer never sets is None."""


class StateRow(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a sequence, and where its state comes from: nothing at start 0, the
    checkpoint `restore`, or else the state after the token before `start`.

    checkpoints: (position, id) of the checkpoints to take, in order; start < position <= start + num_tokens.
    """

    sequence_id: int
    start: int
    num_tokens: int
    restore: int | None = None
    checkpoints: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Group:
    """Tokens `first` to `last` of the step that one call of a module computes: all decoding rows, one token each, or a
    piece of one prompt chunk.

    taken: (index of the sequence in the group, checkpoint id) of the checkpoints to take after the call.
    """

    first: int
    last: int
    sequence_ids: list[int]
    restore: int | None = None
    is_fresh: bool = False
    is_decode: bool = False
    taken: list[tuple[int, int]] = field(default_factory=list)

    def select(self, array: Any, num_tokens: int) -> Any:
        """The group's part of an argument with one row per token: [T, 1, ...] -> [B, 1, ...] or [1, n, ...]; offsets
        [T] -> [B] or [1]. Other arguments are returned as they are."""
        if not isinstance(array, mx.array) or array.ndim == 0 or array.shape[0] != num_tokens:
            return array
        if array.ndim == 1:
            return array[self.first : self.last if self.is_decode else self.first + 1]
        part = array[self.first : self.last]
        return part if self.is_decode else part.swapaxes(0, 1)

    def as_rows(self, array: mx.array) -> mx.array:
        """A result of the module for this group as rows, [n, 1, ...]."""
        return array if self.is_decode else array.swapaxes(0, 1)


def make_groups(rows: Iterable[StateRow]) -> list[Group]:
    """The calls of a step, in the order of its tokens. The leading rows of one token that continue a sequence decode
    together. Every other row is alone, and cut at its checkpoints."""
    groups: list[Group] = []
    first = 0
    for row in rows:
        last = first + row.num_tokens
        decodes = row.num_tokens == 1 and row.start > 0 and row.restore is None
        if decodes and (not groups or (len(groups) == 1 and groups[0].is_decode)):
            if not groups:
                groups.append(Group(0, 0, [], is_decode=True))
            decoding = groups[0]
            decoding.taken.extend((len(decoding.sequence_ids), checkpoint) for _, checkpoint in row.checkpoints)
            groups[0] = Group(0, last, [*decoding.sequence_ids, row.sequence_id], is_decode=True, taken=decoding.taken)
        else:
            at, ids = first, [row.sequence_id]
            is_fresh, restore = row.start == 0, row.restore
            for position, checkpoint in row.checkpoints:
                end = first + position - row.start
                groups.append(Group(at, end, ids, restore, is_fresh, taken=[(0, checkpoint)]))
                at, restore, is_fresh = end, None, False
            if at < last:
                groups.append(Group(at, last, ids, restore, is_fresh))
        first = last
    return groups


class RecurrentLayer(ArraysCache):
    """Replaces mlx-lm's ArraysCache of one layer. It keeps the states of all running sequences, and checkpoints.

    During a step its module reads and writes `cache`, which holds the states of one group at a time. The new states are
    pending until `commit`: a forward pass that fails changes nothing.
    """

    def __init__(self, likes: Sequence[tuple[tuple[int, ...], mx.Dtype] | None], step: StateStep) -> None:
        super().__init__(len(likes))
        self.cache: State  # type: ignore[assignment]
        self.step = step
        self._num_arrays = len(likes)
        self._entries = likes
        self._batch: list[int] = []  # the sequences whose states are stacked, in order
        self._stacked: State = []
        self._single: dict[int, State] = {}  # by sequence, [1, ...] each; they replace those in the stack
        self._checkpoints: dict[int, State] = {}
        self._new_batch: tuple[list[int], State] | None = None
        self._new_single: dict[int, State] = {}
        self._new_checkpoints: dict[int, State] = {}

    def make_mask(self, *_args: Any, **_kwargs: Any) -> None:
        """Returns None: no row of a group is padding."""

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated with each step: otherwise a step would begin with the computation of all earlier ones."""
        states = [self._stacked, *self._single.values(), *self._checkpoints.values()]
        return [array for state in states for array in state if array is not None]

    def load(self, group: Group) -> None:
        """Put the states of a group into `cache`."""
        if group.is_decode:
            self.cache = self._stack(group.sequence_ids)
        elif group.is_fresh:
            self.cache = [None] * self._num_arrays  # the module makes its own zeros
        elif group.restore is not None:
            taken = self._new_checkpoints.get(group.restore)
            self.cache = list(self._checkpoints[group.restore] if taken is None else taken)
        else:
            self.cache = list(self.get(group.sequence_ids[0]))

    def store(self, group: Group) -> None:
        """Take the new states of a group from `cache`."""
        state, self.cache = self.cache, [None] * self._num_arrays
        if group.is_decode:
            self._new_batch = (group.sequence_ids, state)
        else:
            self._new_single[group.sequence_ids[0]] = state
        for index, checkpoint in group.taken:
            self._new_checkpoints[checkpoint] = take(state, [index]) if group.is_decode else state

    def discard(self) -> None:
        """Forget the pending states."""
        self._new_batch, self._new_single, self._new_checkpoints = None, {}, {}

    def commit(self, running: Container[int]) -> None:
        """Replace the states of the step's sequences by the pending ones. running: all sequences that need a state;
        those of others are dropped."""
        if self._new_batch is not None:
            members, stacked = self._new_batch
            leaving = [i for i in self._batch if i in running and i not in members and i not in self._single]
            self._single |= {i: self.get(i) for i in leaving}
            self._batch, self._stacked = members, stacked
            for sequence_id in members:
                self._single.pop(sequence_id, None)
        self._single |= self._new_single
        self._single = {i: state for i, state in self._single.items() if i in running}
        if not any(i in running for i in self._batch):
            self._batch, self._stacked = [], []
        self._checkpoints |= self._new_checkpoints
        self.discard()

    def get(self, sequence_id: int) -> State:
        """The state of one sequence, [1, ...] each."""
        for states in (self._new_single, self._single):
            if sequence_id in states:
                return states[sequence_id]
        return take(self._stacked, [self._batch.index(sequence_id)])

    @property
    def likes(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shapes and types of the arrays that `saved` returns."""
        return [((1, *like[0]), like[1]) for like in self._entries if like is not None]

    def saved(self, sequence_id: int) -> list[mx.array]:
        """The arrays of a sequence's state, to be kept elsewhere."""
        return [array for array in self.get(sequence_id) if array is not None]

    def restore(self, sequence_id: int, arrays: Iterator[mx.array]) -> None:
        """Make the next arrays, from `saved`, the state of a sequence."""
        self._single[sequence_id] = [None if like is None else next(arrays) for like in self._entries]

    def clear(self) -> None:
        self._batch, self._stacked, self._single, self._checkpoints = [], [], {}, {}
        self.discard()

    def _stack(self, members: list[int]) -> State:
        single = [i for i in members if i in self._single]
        if members == self._batch and not single:
            return list(self._stacked)
        stacked = [i for i in members if i not in self._single]
        parts = [take(self._stacked, [self._batch.index(i) for i in stacked])] if stacked else []
        parts += [self._single[i] for i in single]
        joined = [None if arrays[0] is None else mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True)]
        order = [*stacked, *single]
        return joined if order == members else take(joined, [order.index(i) for i in members])


def take(state: State, indices: list[int]) -> State:
    """A copy of some sequences' states: a slice would keep the whole stack in memory."""
    chosen = mx.array(indices)
    return [None if array is None else mx.take(array, chosen, axis=0) for array in state]


class StateStep:
    """The groups of the running step, shared by the recurrent layers of one model. num_tokens: T of the step."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.groups: list[Group] = []

    def begin(self, rows: Iterable[StateRow]) -> None:
        self.groups = make_groups(rows)
        self.num_tokens = self.groups[-1].last if self.groups else 0

    def end(self) -> None:
        self.groups = []


def call_in_groups(module: Module) -> None:
    """Make a module that owns recurrent states run once for each group of a step, instead of on [T, 1] rows."""
    base = type(module)
    if getattr(base, "runs_in_groups", False):
        return

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = next((each for each in (*args, *kwargs.values()) if isinstance(each, RecurrentLayer)), None)
        if layer is None or not layer.step.groups:
            return base.__call__(self, *args, **kwargs)
        step, results = layer.step, []
        for group in step.groups:
            own_args = [group.select(each, step.num_tokens) for each in args]
            own_kwargs = {name: group.select(each, step.num_tokens) for name, each in kwargs.items()}
            layer.load(group)
            results.append(base.__call__(self, *own_args, **own_kwargs))
            layer.store(group)
        return join(step.groups, results)

    module.__class__ = type(base.__name__, (base,), {"__call__": run, "runs_in_groups": True})


def join(groups: Sequence[Group], results: Sequence[Any]) -> Any:
    """Put the groups' results together to [T, 1, ...]. Tuples are joined entry by entry."""
    if isinstance(results[0], (tuple, list)):
        return type(results[0])(join(groups, entries) for entries in zip(*results, strict=True))
    if not isinstance(results[0], mx.array):
        return results[0]
    rows = [group.as_rows(result) for group, result in zip(groups, results, strict=True)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)
