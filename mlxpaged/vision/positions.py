"""Positions in three axes: time, row and column. Qwen's models rotate by them (M-RoPE, Qwen2-VL, arXiv 2409.12191).

A token of text has the same position in all axes, so its rotation is the usual one. The tokens of an image have one
time, and count rows and columns from there. The text after it goes on after the largest of these. So all positions
after an image are shifted back from those in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.base import Module

from mlxpaged.vision.embedding import FeatureRows
from mlxpaged.vision.image import PromptImage

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Axes:
    """sections: how many frequencies of the rotary embedding each axis has. interleaved: whether they take turns, with
    the rest of the frequencies for time, else one section follows the other."""

    sections: tuple[int, int, int]
    interleaved: bool

    def of_frequencies(self, count: int) -> list[int]:
        """Returns the axis of each of so many frequencies. Raises ValueError if the sections are not for so many."""
        if sum(self.sections) != count:
            raise ValueError(f"mrope_section has {sum(self.sections)} frequencies, and the rotary embedding {count}")
        if not self.interleaved:
            return [axis for axis, size in enumerate(self.sections) for _ in range(size)]
        axes = [0] * count
        for axis in (1, 2):
            for frequency in range(axis, min(count, 3 * self.sections[axis]), 3):
                axes[frequency] = axis
        return axes


def positions_of(num_tokens: int, images: Sequence[tuple[PromptImage, tuple[int, int]]]) -> Positions:
    """Returns the positions [3, num_tokens] of a prompt. images: in order, each with its rows and columns, whose
    placeholders follow one another."""
    positions: Positions = np.empty((3, num_tokens), np.int32)
    end = base = 0
    for image, (rows, columns) in images:
        start = image.positions[0]
        positions[:, end:start] = np.arange(base, base + start - end)
        base += start - end
        end = start + rows * columns
        of_rows, of_columns = np.divmod(np.arange(rows * columns), columns)
        positions[:, start:end] = base + np.stack([np.zeros_like(of_rows), of_rows, of_columns])
        base += max(rows, columns)
    positions[:, end:] = np.arange(base, base + num_tokens - end)
    return positions


def shifts_of(images: Sequence[tuple[PromptImage, tuple[int, int]]]) -> list[tuple[int, int]]:
    """Returns (position, shift) for the text after each image: its positions are those in the sequence plus shift."""
    shifts, shift = [], 0
    for image, (rows, columns) in images:
        shift += max(rows, columns) - rows * columns
        shifts.append((image.positions[0] + rows * columns, shift))
    return shifts


class Rotation:
    """Cosines and sines [T, 1, 1, 2 * frequencies] of the running step, made by the rotary embedding itself."""

    def __init__(self, axes: Axes, rope: Any, dims: int) -> None:
        """rope: rotates [T, 1, 1, dims] by one position a row, the first half of a row's elements with the second."""
        self._rope, self._dims = rope, dims
        self._chosen = mx.array(axes.of_frequencies(dims // 2))
        self._positions: mx.array | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    def rotate(self, x: mx.array, positions: mx.array) -> mx.array:
        """x[T, heads, 1, D] or [1, heads, T, D] by positions[3, T]."""
        if positions is not self._positions or self._tables is None:
            ones = mx.ones((positions.shape[1], 1, 1, self._dims // 2))
            parts = [self._rope(mx.concatenate([ones, mx.zeros_like(ones)], -1), offset=each) for each in positions]
            tables = mx.stack(parts)  # [3, T, 1, 1, dims]: cosines, then sines
            chosen = mx.broadcast_to(self._chosen, (1, *ones.shape))
            cosines, sines = (mx.take_along_axis(half, chosen, 0)[0] for half in tables.split(2, -1))
            self._positions, self._tables = positions, (cosines, sines)
        cosines, sines = self._tables
        if x.shape[0] == 1:  # one sequence, as mlx-lm runs it: [1, heads, T, D]
            cosines, sines = cosines.swapaxes(0, 2), sines.swapaxes(0, 2)
        first, second, rest = mx.split(x, [self._dims // 2, self._dims], -1)
        a, b = first.astype(mx.float32), second.astype(mx.float32)
        rotated = mx.concatenate([a * cosines - b * sines, b * cosines + a * sines], -1)
        return mx.concatenate([rotated.astype(x.dtype), rest], -1)


def rotate_by_axes(model: Module, axes: Axes, rows: FeatureRows) -> None:
    """Makes the rotary embeddings of the model's attention use the positions of `rows` in a step that has them. Raises
    ValueError if they are of a kind that this does not describe."""
    for module in model.modules():
        rope: Any = module.get("rope") if isinstance(module, Module) else None
        if isinstance(rope, Module):
            dims = getattr(rope, "dims", None)
            if not isinstance(dims, int) or getattr(rope, "traditional", False):
                raise ValueError("its rotary embedding is not known")
            subclass(rope, axes, dims, rows)


def subclass(rope: Any, axes: Axes, dims: int, rows: FeatureRows) -> None:
    base = type(rope)

    rotation = Rotation(axes, partial(base.__call__, rope), dims)

    def rotate(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        if rows.positions is not None:
            return rotation.rotate(x, rows.positions)
        rotated: mx.array = base.__call__(self, x, offset=offset)
        return rotated

    rope.__class__ = type(base.__name__, (base,), {"__call__": rotate})
