"""Rotary position embedding on a CPU: cosines and sines once a step, not twice a layer.

`mx.fast.rope` is a kernel on a GPU only. On a CPU it is made of some fifteen operations, cosines and sines of every
token's angles among them. Here what a model's own module makes of the vectors (1, 0) is kept: the cosines and sines of
the step's positions, whatever its frequencies and scale. To turn queries or keys by them takes 0.4 of the time (16 rows
of 12 heads: 23 us instead of 58).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE, YarnRoPE


class Turns:
    """Cosines and sines of the positions [T] that came last, for all modules that turn alike. They are known by the
    array, whose numbers must not be changed in place."""

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._tables: dict[int, tuple[mx.array, mx.array]] = {}

    def at(
        self, positions: mx.array, heads: int, dims: int, rope: Callable[..., mx.array]
    ) -> tuple[mx.array, mx.array]:
        """[T, heads, 1, dims] each: broadcast here, once for all layers of a step, which have the same array of
        positions."""
        if positions is not self._positions:
            ones, zeros = mx.ones((positions.size, 1, 1, dims // 2)), mx.zeros((positions.size, 1, 1, dims // 2))
            cosines, sines = rope(mx.concatenate([ones, zeros], axis=-1), offset=positions).split(2, axis=-1)
            self._tables = {1: (mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1))}
            self._positions = positions
        if heads not in self._tables:
            cosines, sines = self._tables[1]
            shape = positions.size, heads, 1, dims
            self._tables[heads] = mx.broadcast_to(cosines, shape), mx.broadcast_to(sines, shape)
        return self._tables[heads]


class TurnsByTables(Module):
    """Comes before a model's own class: turns rows of one token each, [T, heads, 1, D] with T offsets, by tables."""

    turns: Turns
    dims: int

    def __call__(self, x: mx.array, offset: Any = 0, **more: Any) -> mx.array:
        own: Callable[..., mx.array] = super().__call__
        is_a_step = isinstance(offset, mx.array) and x.ndim == 4 and x.shape[2] == 1 and offset.shape == x.shape[:1]
        if not is_a_step or x.dtype != mx.float32 or more:
            return own(x, offset=offset, **more)
        cosines, sines = self.turns.at(offset, x.shape[1], self.dims, own)
        turning = x[..., : self.dims]
        first, second = turning.split(2, axis=-1)
        turned = turning * cosines + mx.concatenate([second, first], axis=-1) * sines
        return turned if self.dims == x.shape[-1] else mx.concatenate([turned, x[..., self.dims :]], axis=-1)


TABLED: dict[Any, type[TurnsByTables]] = {
    own: type(f"Tabled{own.__name__}", (TurnsByTables, own), {}) for own in (RoPE, Llama3RoPE, YarnRoPE)
}
"""Of the ropes that turn the first `dims` elements of a vector, its first half against its second."""


def turn_by_tables(model: Module) -> None:
    """Let the ropes of `model` that are known share tables."""
    shared: dict[Any, Turns] = {}
    for module in model.modules():
        if type(module) in TABLED and not module.traditional:
            module.turns = shared.setdefault(settings(module), Turns())
            module.__class__ = TABLED[type(module)]


def settings(rope: Module) -> tuple[Any, ...]:
    """Ropes of one class that are equal in all they hold turn alike."""
    arrays = {name: value.tolist() for name, value in rope.items() if isinstance(value, mx.array)}
    return type(rope), repr(sorted(vars(rope).items())), repr(sorted(arrays.items()))
