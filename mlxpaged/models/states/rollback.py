"""Takes recurrent states back to the last token that was accepted.

A row with drafts goes through a recurrent module as one chunk of its sequence, so the state after it is that of all its
tokens. The state before the row is kept, and the arguments of each module. If the sequence's next row begins before the
end of this one, drafts were rejected. Then these modules, and nothing else of the model, run once more for the tokens
that hold, from the state before. Their outputs are dropped, and MLX computes only what the new state depends on.

Rows of which different numbers of tokens hold are one call, if the modules take a mask of tokens and the lengths of
rows, as mlx-lm pads prompts of a batch. parts/drafting/draft_check.py finds out whether they do.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import mlx.core as mx

from mlxpaged.attention.token_groups import StateGroup, TokenGroup, running_group
from mlxpaged.core.step import Row

if TYPE_CHECKING:
    from mlxpaged.attention.layer import StepContext

State = list[mx.array | None]
"""The arrays of one layer, [n, ...] each for n sequences. An entry that the layer never sets is None."""

Adapters = Callable[[Sequence[str | None], int], AbstractContextManager[None]]
"""Until the end of the context, rows of as many tokens each are computed with these adapters."""


def take(state: State, indices: list[int]) -> State:
    """A copy of some sequences' states: a slice would keep the whole stack in memory."""
    chosen = mx.array(indices)
    return [None if array is None else mx.take(array, chosen, axis=0) for array in state]


def concatenated(states: Sequence[State]) -> State:
    """The states of all sequences of several stacks."""
    if len(states) == 1:
        return list(states[0])
    return [None if arrays[0] is None else mx.concatenate(list(arrays)) for arrays in zip(*states, strict=True)]


class RowArgument(NamedTuple):
    """An argument of a module that differs by row: [B, n, ...] for rows of n tokens, or their offsets [B]."""

    array: mx.array


ELSEWHERE = RowArgument(mx.array(0))
"""Stands for an argument that is kept elsewhere."""


class StateLayer(Protocol):
    """The states of one layer (states.py). alone: whether its modules get one sequence at a time. cache, lengths: what
    its modules read and write."""

    alone: bool
    cache: Any
    lengths: Any

    def before_group(self, index: int) -> State: ...

    def put(self, sequence_ids: list[int], state: State) -> None: ...


class ModuleCall(NamedTuple):
    """A call of a module for a group. Its cache is the layer itself. layers: those whose states it changes."""

    call: partial[Any]
    args: list[Any]
    named: dict[str, Any]
    layers: Sequence[StateLayer]


CallsOfGroups = dict[tuple[bool, int], list[ModuleCall]]
"""The calls for each group, by whether the layers get one sequence at a time, and by the index of the group."""


def replaced(value: Any, replace: Callable[[mx.array], Any]) -> Any:
    """An argument with others in place of its RowArguments."""
    if isinstance(value, RowArgument):
        return replace(value.array)
    if isinstance(value, list):
        return [replaced(each, replace) for each in value]
    return {name: replaced(each, replace) for name, each in value.items()} if isinstance(value, dict) else value


def leaves_of(value: Any) -> Iterator[Any]:
    """What an argument consists of, in order."""
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(each)
    else:
        yield value


def row_arrays(value: Any) -> Iterator[mx.array]:
    """The arrays of an argument's RowArguments, in order."""
    return (each.array for each in leaves_of(value) if isinstance(each, RowArgument))


@dataclass
class KeptRows:
    """Rows of as many tokens that one step has computed together. members: the index of each row whose sequence has had
    no row since. before: the states of all rows, by layer. calls: in order."""

    rows: list[Row]
    members: dict[int, int]
    before: dict[StateLayer, State]
    calls: list[ModuleCall]

    @property
    def arrays(self) -> Iterator[mx.array]:
        for call in self.calls:
            yield from row_arrays([call.args, call.named])
        for state in self.before.values():
            yield from (array for array in state if array is not None)

    def select(self, indices: list[int]) -> KeptRows:
        """A copy of some of the rows."""
        if indices == list(range(len(self.rows))):
            return self
        chosen = mx.array(indices)

        def selected(array: mx.array) -> RowArgument:
            return RowArgument(mx.take(array, chosen, axis=0))

        rows = [self.rows[i] for i in indices]
        return KeptRows(
            rows,
            {row.sequence_id: i for i, row in enumerate(rows)},
            {layer: take(state, indices) for layer, state in self.before.items()},
            [
                call._replace(args=replaced(call.args, selected), named=replaced(call.named, selected))
                for call in self.calls
            ],
        )


class Rollback:
    """The rows with drafts whose outcome no next row has shown yet, for all layers of a model.

    pads: whether rows of different lengths are padded to be one call. replays: whether the arguments that differ by
    step are those that differ by row, so that graphs of steps with drafts can serve later ones. module_calls: how often
    a module ran once more.
    """

    def __init__(self) -> None:
        self._kept: list[KeptRows] = []
        self._pending: dict[tuple[bool, int], KeptRows] = {}  # of the running step, as in CallsOfGroups
        self.module_calls = 0
        self.pads = False
        self.replays = True

    def pad(self, pads: bool) -> None:
        """From now on rows of different lengths are padded to be one call, or are not."""
        self.pads = pads

    @property
    def is_empty(self) -> bool:
        return not self._kept

    @property
    def arrays(self) -> list[mx.array]:
        """Evaluated with each step: otherwise they would keep what they were computed from."""
        return [array for kept in self._kept for array in kept.arrays]

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that are kept."""
        calls = [call for kept in self._kept for call in kept.calls]
        return sum(array.nbytes for call in calls for array in row_arrays([call.args, call.named]))

    def keep(self, index: int, group: StateGroup, call: ModuleCall) -> None:
        """A module computes the rows of a group of the running step."""
        key = call.layers[0].alone, index
        if key not in self._pending:
            members = {row.sequence_id: i for i, row in enumerate(group.with_drafts)}
            self._pending[key] = KeptRows(group.with_drafts, members, {}, [])
        kept = self._pending[key]
        for layer in call.layers:
            kept.before.setdefault(layer, layer.before_group(index))
        kept.calls.append(call)
        if any(isinstance(each, mx.array) for each in leaves_of([call.args, call.named])):
            self.replays = False

    def traced(self) -> tuple[CallsOfGroups, list[mx.array]]:
        """The calls of a step that is traced, without their arguments, and these, which are outputs of its graph."""
        arguments: list[mx.array] = []

        def moved(array: mx.array) -> RowArgument:
            arguments.append(array)
            return ELSEWHERE

        calls = {
            key: [
                call._replace(args=replaced(call.args, moved), named=replaced(call.named, moved)) for call in kept.calls
            ]
            for key, kept in self._pending.items()
        }
        return calls, arguments

    def replay(self, step: StepContext, calls: CallsOfGroups, arguments: Iterable[mx.array]) -> None:
        """Keep the rows of a replayed step, with what `traced` has returned for its graph."""
        rest = (RowArgument(array) for array in arguments)
        for (alone, index), of_group in calls.items():
            group = (step.alone if alone else step.groups)[index]
            for call in of_group:
                args, named = replaced([call.args, call.named], partial(following, rest))
                self.keep(index, group, call._replace(args=args, named=named))

    def discard(self) -> None:
        """Forget the rows of the running step."""
        self._pending = {}

    def commit(self, running: Container[int]) -> None:
        """Keep the rows of the running step. running: as for the states."""
        self._kept += self._pending.values()
        self.discard()
        for kept in self._kept:
            kept.members = {i: index for i, index in kept.members.items() if i in running}
        self._kept = [kept for kept in self._kept if kept.members]

    def clear(self) -> None:
        self._kept = []
        self.discard()

    def forget(self, sequence_id: int) -> None:
        """A sequence does not go on from its own state."""
        for kept in self._kept:
            kept.members.pop(sequence_id, None)

    def roll_back(self, starts: Mapping[int, int], adapters: Adapters = lambda *_: nullcontext()) -> None:
        """Make the states of sequences those before the tokens at these positions, with which they go on. Raises
        ValueError if a state of that position is not known."""
        # By the tokens that hold if rows are not padded, and for layers that are alone by sequence.
        found: dict[tuple[int, int], list[tuple[KeptRows, list[int]]]] = {}
        for kept in self._kept:
            alone = kept.calls[0].layers[0].alone
            counts: dict[tuple[int, int], dict[int, int]] = {}
            for i, index in [(i, kept.members[i]) for i in starts.keys() & kept.members.keys()]:
                row = kept.rows[index]
                count = starts[i] - row.start
                if not 0 < count <= row.num_tokens:
                    raise ValueError(f"sequence {i} has no state of position {starts[i]}: {row.start} was the last")
                if count < row.num_tokens:
                    key = 0 if self.pads and not alone else count, i if alone else -1
                    counts.setdefault(key, {})[index] = count
                del kept.members[i]
            for key, by_row in counts.items():
                indices = sorted(by_row)
                found.setdefault(key, []).append((kept.select(indices), [by_row[index] for index in indices]))
        left = [kept.select(sorted(kept.members.values())) for kept in self._kept if kept.members]
        for parts in found.values():
            self._run([part for part, _ in parts], [count for _, counts in parts for count in counts], adapters)
        self._kept = left

    def _run(self, parts: list[KeptRows], counts: list[int], adapters: Adapters) -> None:
        """Run the first tokens of some rows once more. counts: of each row."""
        rows, length = [row for part in parts for row in part.rows], max(counts)
        states = {layer: concatenated([part.before[layer] for part in parts]) for layer in parts[0].before}
        group = TokenGroup(0, length * len(rows), is_rows=True, length=length)
        mask = mx.arange(length) < mx.array(counts)[:, None] if min(counts) < length else None
        with adapters([row.adapter for row in rows], length), running_group(group):
            for calls in zip(*(part.calls for part in parts), strict=True):
                first = calls[0]
                arrays = zip(*(row_arrays([call.args, call.named]) for call in calls), strict=True)
                joined = iter([first_tokens(each, length) for each in arrays])
                args, named = replaced([first.args, first.named], partial(following, joined))
                for layer in first.layers:
                    layer.cache = list(states[layer])
                    layer.lengths = None if mask is None else mx.array(counts)  # the module counts them down
                try:
                    if mask is None:
                        first.call(*args, **named)
                    else:
                        call_with_mask(first.call, args, named, mask)
                finally:
                    for layer in first.layers:
                        states[layer], layer.cache = layer.cache, [None] * len(layer.cache)
                        layer.lengths = None
                self.module_calls += 1
        for layer, state in states.items():
            layer.put([row.sequence_id for row in rows], state)


@functools.lru_cache(64)
def signature_of(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


def call_with_mask(call: partial[Any], args: list[Any], named: dict[str, Any], mask: mx.array) -> None:
    """Call a method of a module with a mask [B, n] of its tokens. Raises ValueError if it takes none."""
    bound = signature_of(call.func).bind(*call.args, *args, **named)
    if "mask" not in bound.signature.parameters or bound.arguments.get("mask") is not None:
        raise ValueError("the module takes no mask of its tokens")
    bound.arguments["mask"] = mask
    call.func(*bound.args, **bound.kwargs)


def following(others: Iterator[Any], _: mx.array) -> Any:
    """The next of some others, in place of an argument."""
    return next(others)


def first_tokens(arrays: Sequence[mx.array], length: int) -> mx.array:
    """The first tokens of rows [B, n, ...] of several groups, with zeros after those of shorter rows; offsets [B] stay
    as they are."""
    if arrays[0].ndim > 1:
        arrays = [array[:, :length] for array in arrays]
        arrays = [
            array
            if array.shape[1] == length
            else mx.pad(array, [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
            for array in arrays
        ]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays))
