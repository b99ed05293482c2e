"""The LoRA adapters of a step's rows: which rows of a module's input belong to which adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.attention import token_groups
from mlxpaged.models.head import RowSelection

IntArray = npt.NDArray[np.int32]

Selected = tuple[str, "mx.array | None"]
"""An adapter, and a mask of the rows that it computes; None for all."""


class StepAdapters:
    """The adapters of the running step's rows, shared by the adapted layers of one model.

    active: the adapters of the step, in a fixed order; None is the base. head: selects the rows of the output head.
    """

    def __init__(self) -> None:
        self.active: tuple[str | None, ...] = ()
        self.head: RowSelection | None = None
        self._host_index: IntArray = np.zeros(0, np.int32)
        self._index: mx.array | None = None
        self._parts: dict[int, mx.array] = {}  # by the identity of the group or the head
        self._masks: dict[int, list[Selected]] = {}
        self._routes_experts = False
        self._decoded: tuple[mx.array, mx.array, mx.array] | None = None

    def begin(self, adapters: Sequence[str | None], query_lens: Sequence[int]) -> IntArray | None:
        """Start a step. adapters, query_lens: of its rows. Returns the index [T] of each token's adapter in `active`,
        which `upload` gets as an array on the device; None if all rows have the same one."""
        self.active = tuple(sorted(set(adapters), key=lambda name: name or ""))
        if len(self.active) == 1:
            return None
        self._host_index = np.repeat([self.active.index(name) for name in adapters], query_lens).astype(np.int32)
        return self._host_index

    def upload(self, index: mx.array) -> None:
        self._index = index

    @contextmanager
    def of_rows(self, adapters: Sequence[str | None], num_tokens: int) -> Iterator[None]:
        """Until the end of the context, rows of so many tokens each are computed outside of a step."""
        index = self.begin(adapters, [num_tokens] * len(adapters))
        try:
            if index is not None:
                self.upload(mx.array(index))
            yield
        finally:
            self.end()

    def end(self) -> None:
        self.active, self._index, self._decoded = (), None, None
        self._parts, self._masks = {}, {}

    def masks(self) -> list[Selected]:
        """The adapters of the rows that the running module gets, with the rows of each."""
        if len(self.active) < 2:
            return [(name, None) for name in self.active if name is not None]
        group = token_groups.running
        if group is not None and not group.is_rows:  # a piece of one sequence
            name = self.active[self._host_index[group.first]]
            return [] if name is None else [(name, None)]
        index = self.index()
        if id(index) not in self._masks:
            self._masks[id(index)] = self.masks_of(index)
        return self._masks[id(index)]

    def masks_of(self, index: mx.array) -> list[Selected]:
        return [(name, index == i) for i, name in enumerate(self.active) if name is not None]

    def index(self) -> mx.array:
        """The index of the adapter of each row that the running module gets, if the step's rows differ."""
        assert self._index is not None
        group, head = token_groups.running, self.head
        if group is not None:
            if id(group) not in self._parts:
                self._parts[id(group)] = group.first_tokens(self._index)
            return self._parts[id(group)]
        if head is not None and head.is_projecting:
            if id(head) not in self._parts:
                self._parts[id(head)] = head(self._index)
            return self._parts[id(head)]
        return self._index

    # -- experts -----------------------------------------------------------------------------------------------------

    @contextmanager
    def route_experts(self) -> Iterator[None]:
        """Until the end of the context, indices of experts also have the index of the row's adapter."""
        self._routes_experts = True
        try:
            yield
        finally:
            self._routes_experts, self._decoded = False, None

    def encode(self, experts: mx.array) -> mx.array | None:
        """Put the index of each row's adapter into its indices of experts [rows, ...]; None if all rows have the same.

        Modules of experts sort their rows by these indices. Rows of one expert are still neighbours afterwards.
        """
        group = token_groups.running
        if len(self.active) < 2 or (group is not None and not group.is_rows):
            return None
        index = as_column(self.index(), experts)
        return experts * len(self.active) + index.astype(experts.dtype)

    def decode(self, encoded: mx.array) -> tuple[mx.array, mx.array | None]:
        """The experts, and the index of the adapter for each of them; None if `encode` has not put one in."""
        if not self._routes_experts:
            return encoded, None
        if self._decoded is None or self._decoded[0] is not encoded:  # the layers of a module get the same array
            count = len(self.active)
            self._decoded = encoded, encoded // count, encoded % count
        return self._decoded[1:]


def as_column(rows: mx.array, like: mx.array) -> mx.array:
    """[n] -> [n, 1, ...] with as many axes as `like` has. Raises ValueError if that has another number of rows."""
    if like.shape[0] != rows.shape[0]:
        raise ValueError(f"a layer with an adapter gets {like.shape[0]} rows for {rows.shape[0]} tokens")
    return rows.reshape(-1, *[1] * (like.ndim - 1))
