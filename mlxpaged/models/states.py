"""The recurrent states of a model's layers: those of the running sequences, and checkpoints of earlier positions.

A state-space or linear-attention layer keeps one state of fixed size per sequence instead of keys and values per token.
mlx-lm stores it in an ArraysCache: a few arrays whose first axis is the batch. Here the states of all decoding
sequences stay stacked on that axis, so that a decode step copies none. They are permuted only when the batch changes.

MLX arrays are immutable. So a checkpoint is a reference to a state, and a step whose forward pass fails changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList

from mlxpaged.attention.latent import LatentLayer
from mlxpaged.attention.layer import StepContext
from mlxpaged.attention.token_groups import Masks, StateGroup, TokenGroup, running_group

State = list[mx.array | None]
"""The arrays of one layer, [n, ...] each for n sequences. An entry that the layer never sets is None."""


class RecurrentLayer(ArraysCache):
    """Replaces mlx-lm's ArraysCache of one layer. It keeps the states of all running sequences, and checkpoints.

    During a step its modules read and write `cache`, which holds the states of one group at a time. The new states are
    pending until `commit`: a forward pass that fails changes nothing. A layer can have several modules that each use
    some of the arrays (RWKV-7): each goes through all groups of the step.
    """

    def __init__(
        self, likes: Sequence[tuple[tuple[int, ...], mx.Dtype] | None], step: StepContext, alone: bool = False
    ) -> None:
        super().__init__(len(likes))
        self.cache: State  # type: ignore[assignment]
        self.alone = alone
        self.step = step
        self._entries = likes
        self._batch: list[int] = []  # the sequences whose states are stacked, in order
        self._stacked: State = []
        self._single: dict[int, State] = {}  # by sequence, [1, ...] each; they replace those in the stack
        self._checkpoints: dict[int, State] = {}
        self._taken: list[int] = []  # checkpoints of the last step
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
        states = [self._stacked, *self._single.values(), *(self._checkpoints[i] for i in self._taken)]
        return [array for state in states for array in state if array is not None]

    def load(self, index: int) -> RecurrentLayer:
        """Put the states of a group into `cache`. Returns what the module gets as its cache."""
        self.cache = self._before(index)
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
        return [self._before(index) for index in range(len(self.groups))]

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
        self._written, self._after, self._loaded = {}, {}, []

    def commit(self, running: Container[int]) -> None:
        """Replace the states of the step's sequences by the pending ones. running: all sequences that need a state;
        those of others are dropped."""
        self._taken = [checkpoint for group in self.groups for _, checkpoint in group.taken]
        for index, group in enumerate(self.groups):
            after = self._after[index]
            if group.is_rows:
                for i in self._batch if self._batch != group.sequence_ids else ():
                    if i in running and i not in group.sequence_ids and i not in self._single:
                        self._single[i] = self.get(i)
                self._batch, self._stacked = group.sequence_ids, after
                for i in group.sequence_ids if self._single else ():
                    self._single.pop(i, None)
            else:
                self._single[group.sequence_ids[0]] = after
            for i, checkpoint in group.taken:
                self._checkpoints[checkpoint] = take(after, [i]) if group.is_rows else after
        self._single = {i: state for i, state in self._single.items() if i in running}
        if not any(i in running for i in self._batch):
            self._batch, self._stacked = [], []
        self.discard()

    def get(self, sequence_id: int) -> State:
        """The state of one sequence, [1, ...] each."""
        if sequence_id in self._single:
            return list(self._single[sequence_id])
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
        self._batch, self._stacked, self._single, self._checkpoints, self._taken = [], [], {}, {}, []
        self.discard()

    def _before(self, index: int) -> State:
        if self._bound is not None:
            return list(self._bound[index])
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

            def own(value: Any, index: int = index, group: TokenGroup = group, caches: dict[int, Any] = caches) -> Any:
                if isinstance(value, CacheList):
                    return CacheList(*map(own, value.caches))
                if isinstance(value, list):
                    return [own(each) for each in value]
                if isinstance(value, Masks):
                    return value.by_group[index]
                return caches[id(value)] if id(value) in caches else group.select(value, num_tokens)

            with running_group(group):
                named = {name: own(each) for name, each in kwargs.items()}
                results.append(base.__call__(self, *map(own, args), **named))
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
