"""The recurrent states of a model's layers: those of the running sequences, and checkpoints of earlier positions.

A state-space or linear-attention layer keeps one state of fixed size per sequence instead of keys and values per token.
mlx-lm stores it in an ArraysCache: a few arrays whose first axis is the batch. Here the states of all decoding
sequences stay stacked on that axis, so that a decode step copies none. They are permuted only when the batch changes.

MLX arrays are immutable. So a checkpoint is a reference to a state, and a step whose forward pass fails changes none.
Rows with drafts may have to be taken back in part: see rollback.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxpaged.attention.latent import LatentLayer
from mlxpaged.attention.layer import StepContext
from mlxpaged.attention.token_groups import Masks, StateGroup, TokenGroup, running_group
from mlxpaged.models.states.rollback import ModuleCall, Rollback, RowArgument, State, concatenated, replaced, take


class StateArrays(ArraysCache):
    """mlx-lm's cache of recurrent states, with the methods by which mlx-vlm's layers change them."""

    def update_window(self, index: int, source: mx.array, width: int, **_: Any) -> mx.array:
        """Keep the last `width` inputs of a convolution. source: [B, inputs, channels]."""
        self[index] = mx.contiguous(source[:, source.shape[1] - width :])
        return self[index]  # type: ignore[no-any-return]

    def update_recurrent(self, index: int, _length: int, update: Callable[..., Any]) -> tuple[Any, Any]:
        """Keep the new state that `update` makes of the old one. Returns its output, and the state."""
        output, self[index] = update(self[index], None)[:2]
        return output, self[index]


class RecurrentLayer(StateArrays):
    """Replaces mlx-lm's ArraysCache of one layer. It keeps the states of all running sequences, and checkpoints.

    During a step its modules read and write `cache`, which holds the states of one group at a time. The new states are
    pending until `commit`: a forward pass that fails changes nothing. A layer can have several modules that each use
    some of the arrays (RWKV-7): each goes through all groups of the step.
    """

    def __init__(
        self,
        likes: Sequence[tuple[tuple[int, ...], mx.Dtype] | None],
        step: StepContext,
        alone: bool = False,
        rollback: Rollback | None = None,
    ) -> None:
        """alone: whether its modules get one sequence at a time. rollback: of all layers of the model."""
        super().__init__(len(likes))
        self.cache: State  # type: ignore[assignment]
        self.alone = alone
        self.step = step
        self.rollback = Rollback() if rollback is None else rollback
        self._entries = likes
        self._batches: list[list[int]] = []  # the sequences of each stack of states; the first that has one counts
        self._stacks: list[State] = []
        self._single: dict[int, State] = {}  # by sequence, [1, ...] each; they replace those in the stacks
        self._checkpoints: dict[int, State] = {}
        self._taken: list[int] = []  # checkpoints of the last step
        self._before: dict[int, State] = {}  # by group
        self._written: dict[int, dict[int, mx.array | None]] = {}  # by group: the arrays that its modules have set
        self._after: dict[int, State] = {}  # by group: all arrays after it
        self._loaded: State = []  # what `load` has put into `cache`
        self._bound: Sequence[State] | None = None  # by group: the inputs of a graph while it is traced

    def make_mask(self, *_args: Any, **_kwargs: Any) -> None:
        """Returns None: no row of a group is padding."""

    @property
    def groups(self) -> list[StateGroup]:
        return self.step.alone if self.alone else self.step.groups

    @property
    def num_tokens(self) -> int:
        return self.step.num_tokens

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated with each step: otherwise a step would begin with the computation of all earlier ones.

        Checkpoints of earlier steps are left out. There may be thousands, and MLX takes 0.5 us for each array."""
        states = [*self._stacks, *self._single.values(), *(self._checkpoints[i] for i in self._taken)]
        return [array for state in states for array in state if array is not None]

    def load(self, index: int) -> RecurrentLayer:
        """Put the states of a group into `cache`. Returns what the module gets as its cache."""
        self.cache = list(self.before_group(index))
        for entry, array in self._written.get(index, {}).items():
            self.cache[entry] = array
        self._loaded = list(self.cache)
        return self

    def store(self, index: int) -> None:
        """Take the states of a group from `cache`."""
        written = self._written.setdefault(index, {})
        written |= {entry: array for entry, array in enumerate(self.cache) if array is not self._loaded[entry]}
        self._after[index], self.cache = self.cache, [None] * len(self._entries)

    @property
    def before(self) -> list[State]:
        """The states before each group of a step that decodes: inputs of its graph. They are in the order of the
        batch, so the graph does not depend on which sequences these are."""
        return [list(self.before_group(index)) for index in range(len(self.groups))]

    @property
    def after(self) -> list[State]:
        """The pending states, after each group: outputs of its graph."""
        return [self._after[index] for index in range(len(self.groups))]

    @after.setter
    def after(self, states: Sequence[State]) -> None:
        self._after = dict(enumerate(states))

    def bind(self, before: Sequence[State] | None) -> None:
        """Take these arrays for what `before` has returned, while a graph is traced; None ends it."""
        self._bound = before

    def discard(self) -> None:
        """Forget the pending states."""
        self._before, self._written, self._after, self._loaded = {}, {}, {}, []

    def commit(self, running: Container[int]) -> None:
        """Replace the states of the step's sequences by the pending ones. running: all sequences that need a state;
        those of others are dropped."""
        self._taken = [checkpoint for group in self.groups for _, checkpoint in group.taken]
        if batches := () if self.alone else self.step.batches:
            if batches != self._batches:
                self._leave_stacks(running, {i for ids in batches for i in ids})
            self._batches, self._stacks = batches, [self._after[index] for index in range(len(batches))]
            for i in [i for ids in batches for i in ids] if self._single else ():
                self._single.pop(i, None)
        for index, group in enumerate(self.groups):
            after = self._after[index]
            if not group.is_rows:
                self._single[group.sequence_ids[0]] = after
            for i, checkpoint in group.taken:
                self._checkpoints[checkpoint] = take(after, [i]) if group.is_rows else after
        self._single = {i: state for i, state in self._single.items() if i in running}
        if not any(i in running for ids in self._batches for i in ids):
            self._batches, self._stacks = [], []
        self.discard()

    def _leave_stacks(self, running: Container[int], decoding: Container[int]) -> None:
        """Take the states of running sequences that do not decode out of the stacks."""
        for i in [i for ids in self._batches for i in ids]:
            if i in running and i not in decoding and i not in self._single:
                self._single[i] = self.get(i)

    def get(self, sequence_id: int) -> State:
        """The state of one sequence, [1, ...] each."""
        if sequence_id in self._single:
            return list(self._single[sequence_id])
        number = next(number for number, ids in enumerate(self._batches) if sequence_id in ids)
        return take(self._stacks[number], [self._batches[number].index(sequence_id)])

    def put(self, sequence_ids: list[int], state: State) -> None:
        """Replace the states of sequences: the only one if the layer is alone."""
        if self.alone:
            self._single[sequence_ids[0]] = state
            return
        for i in sequence_ids:
            self._single.pop(i, None)
        self._batches, self._stacks = [sequence_ids, *self._batches], [state, *self._stacks]

    @property
    def likes(self) -> list[tuple[tuple[int, ...], mx.Dtype]]:
        """Shapes and types of the arrays that `saved` returns."""
        return [((1, *like[0]), like[1]) for like in self._entries if like is not None]

    def saved(self, sequence_id: int) -> list[mx.array]:
        """The arrays of a sequence's state, to be kept elsewhere."""
        return [array for array in self.get(sequence_id) if array is not None]

    def restore(self, sequence_id: int, arrays: Iterator[mx.array]) -> None:
        """Make the next arrays, from `saved`, the state of a sequence."""
        self._single[sequence_id] = self._state(arrays)

    def checkpoint(self, number: int) -> list[mx.array]:
        """The arrays of a checkpoint, to be kept elsewhere."""
        return [array for array in self._checkpoints[number] if array is not None]

    def put_checkpoint(self, number: int, arrays: Iterator[mx.array]) -> None:
        """Make the next arrays, from `checkpoint`, a checkpoint."""
        self._checkpoints[number] = self._state(arrays)

    def _state(self, arrays: Iterator[mx.array]) -> State:
        return [None if like is None else next(arrays) for like in self._entries]

    def clear(self) -> None:
        self._batches, self._stacks, self._single, self._checkpoints, self._taken = [], [], {}, {}, []
        self.discard()

    def before_group(self, index: int) -> State:
        """The states before a group. Those that continue another group change with each module that has computed it."""
        if self._bound is not None:
            return self._bound[index]
        if self.groups[index].previous is not None:
            return self._find_before(index)
        if index not in self._before:
            self._before[index] = self._find_before(index)
        return self._before[index]

    def _find_before(self, index: int) -> State:
        group = self.groups[index]
        if group.previous is not None:
            before, sequence = group.previous
            after = self._after[before]
            return take(after, [sequence]) if self.groups[before].is_rows else list(after)
        if group.is_rows:
            return self._stack(group.sequence_ids)
        if group.is_fresh:
            return [None] * len(self._entries)  # the module makes its own zeros
        if group.restore is not None:
            return list(self._checkpoints[group.restore])
        return self.get(group.sequence_ids[0])

    def _stack(self, members: list[int]) -> State:
        if not self._single and self._batches == [members]:  # as in most steps
            return self._stacks[0]
        order = [i for i in members if i in self._single]
        parts = [self._single[i] for i in order]
        left = [i for i in members if i not in self._single] if order else members
        for ids, state in zip(self._batches, self._stacks, strict=True):
            if ids == left:
                parts.append(state)
                order, left = order + left, []
                break
            index = {i: n for n, i in enumerate(ids)}
            if chosen := [i for i in left if i in index]:
                parts.append(take(state, [index[i] for i in chosen]))
                order += chosen
                left = [i for i in left if i not in index]
        if left:
            raise ValueError(f"sequences {left} have no state")
        joined = concatenated(parts)
        return joined if order == members else take(joined, [order.index(i) for i in members])


class SequenceCaches:
    """Keeps one of mlx-lm's own caches for each running sequence, for a module that cannot take rows of many sequences.

    It is right for any cache, and slower: the module is called once per sequence. The caches are changed in place, so
    they have no checkpoints and cannot be swapped out.
    """

    alone = True

    def __init__(self, make: Callable[[], Any], step: StepContext) -> None:
        self._make = make
        self.step = step
        self._caches: dict[int, Any] = {}

    def make_mask(self, _num_tokens: int, *args: Any, **kwargs: Any) -> Masks:
        masks = []
        for group in self.groups:
            cache = self._make() if group.is_fresh else self._caches[group.sequence_ids[0]]
            masks.append(cache.make_mask(group.last - group.first, *args, **kwargs))
        return Masks(masks)

    @property
    def groups(self) -> list[StateGroup]:
        return self.step.alone

    @property
    def num_tokens(self) -> int:
        return self.step.num_tokens

    @property
    def arrays(self) -> list[mx.array]:
        leaves: Any = tree_flatten([cache.state for cache in self._caches.values()])
        return [array for _, array in leaves if isinstance(array, mx.array)]

    def load(self, index: int) -> Any:
        group = self.groups[index]
        sequence_id = group.sequence_ids[0]
        if group.is_fresh:
            self._caches[sequence_id] = self._make()
        return self._caches[sequence_id]

    def store(self, index: int) -> None:
        """The cache has changed in place."""

    def discard(self) -> None:
        """Nothing is pending."""

    def commit(self, running: Container[int]) -> None:
        self._caches = {i: cache for i, cache in self._caches.items() if i in running}

    def clear(self) -> None:
        self._caches = {}


def call_in_groups(module: Module) -> None:
    """Make a module that owns recurrent states, latents or caches of single sequences run once for each group of a
    step, instead of on [T, 1] rows."""
    base = type(module)
    if getattr(base, "runs_in_groups", False):
        return

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        owned = [layer for layer in layers_in((*args, *kwargs.values())) if layer.groups]
        if not owned:
            return base.__call__(self, *args, **kwargs)
        groups, num_tokens = owned[0].groups, owned[0].num_tokens
        results = []
        for index, group in enumerate(groups):
            caches = {id(layer): layer.load(index) for layer in owned}
            drafted = group if isinstance(group, StateGroup) and group.with_drafts else None

            def own(
                value: Any,
                index: int = index,
                group: TokenGroup = group,
                caches: dict[int, Any] = caches,
                keeps: bool = drafted is not None,
            ) -> Any:
                if isinstance(value, CacheList):
                    return CacheList(*map(own, value.caches))
                if isinstance(value, list):
                    return [own(each) for each in value]
                if isinstance(value, Masks):
                    return value.by_group[index]
                if id(value) in caches:
                    return caches[id(value)]
                part = group.select(value, num_tokens)
                # A copy, or else a few rows would keep the arguments of a whole prompt chunk in memory.
                return RowArgument(mx.contiguous(part)) if keeps and part is not value else part

            with running_group(group):
                own_args, named = list(map(own, args)), {name: own(each) for name, each in kwargs.items()}
                if drafted is not None:
                    states = [layer for layer in owned if isinstance(layer, RecurrentLayer)]
                    call = ModuleCall(partial(base.__call__, self), own_args, named, states)
                    states[0].rollback.keep(index, drafted, call)
                    own_args, named = replaced([own_args, named], lambda array: array)
                results.append(base.__call__(self, *own_args, **named))
            for layer in owned:
                layer.store(index)
        return join(groups, results)

    module.__class__ = type(base.__name__, (base,), {"__call__": run, "runs_in_groups": True})


def layers_in(values: Iterable[Any]) -> Iterator[RecurrentLayer | SequenceCaches | LatentLayer]:
    for value in values:
        if isinstance(value, (RecurrentLayer, SequenceCaches, LatentLayer)):
            yield value
        elif isinstance(value, (CacheList, list)):
            yield from layers_in(value.caches if isinstance(value, CacheList) else value)


def join(groups: Sequence[TokenGroup], results: Sequence[Any]) -> Any:
    """Put the groups' results together to [T, 1, ...]. Tuples are joined entry by entry."""
    if isinstance(results[0], (tuple, list)):
        return type(results[0])(join(groups, entries) for entries in zip(*results, strict=True))
    if not isinstance(results[0], mx.array):
        return results[0]
    rows = [group.as_rows(result) for group, result in zip(groups, results, strict=True)]
    return rows[0] if len(rows) == 1 else mx.concatenate(rows)
