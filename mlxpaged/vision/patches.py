"""What the towers have in common: pixels to patches, their order, and the rotation of heads."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

CHANNELS = 3


def normalized(pixels: mx.array, mean: tuple[float, ...], std: tuple[float, ...]) -> mx.array:
    """Returns the pixels as a tower was trained on them, in float32. pixels: uint8 [..., 3]. mean, std: of the colours
    from 0 to 1."""
    return (pixels.astype(mx.float32) / 255 - mx.array(mean)) / mx.array(std)


def patches_of(pixels: mx.array, side: int, mean: tuple[float, ...], std: tuple[float, ...]) -> mx.array:
    """Returns the colours of the patches, [n, rows, columns, side * side * 3], each patch row by row. pixels: uint8
    [n, H, W, 3]."""
    n, height, width, _ = pixels.shape
    patches = (
        normalized(pixels, mean, std).reshape(n, height // side, side, width // side, side, CHANNELS).swapaxes(2, 3)
    )
    return patches.reshape(n, height // side, width // side, -1)


def in_squares(grid: mx.array, merge: int) -> mx.array:
    """Returns [n, rows * columns, ...] for a grid [n, rows, columns, ...]: square by square of merge * merge patches,
    row by row each."""
    n, rows, columns, *rest = grid.shape
    squares = grid.reshape(n, rows // merge, merge, columns // merge, merge, *rest).swapaxes(2, 3)
    return squares.reshape(n, rows * columns, *rest)


class Rotation(NamedTuple):
    """cosines, sines: of each patch, [..., half of a head]. The first half of a head turns with the second."""

    cosines: mx.array
    sines: mx.array

    @classmethod
    def of(cls, angles: mx.array) -> Rotation:
        return cls(mx.cos(angles), mx.sin(angles))

    def __call__(self, heads: mx.array) -> mx.array:
        first, second = mx.split(heads.astype(self.cosines.dtype), 2, axis=-1)
        parts = [first * self.cosines - second * self.sines, second * self.cosines + first * self.sines]
        return mx.concatenate(parts, axis=-1).astype(heads.dtype)


def frequencies_of(size: int, base: float) -> mx.array:
    """Returns the frequencies of `size` elements that turn in pairs."""
    return base ** -(mx.arange(0, size, 2, dtype=mx.float32) / size)


def angles_of(rows: int, columns: int, of_row: mx.array, of_column: mx.array) -> mx.array:
    """Returns [rows, columns, frequencies]: the row of each patch times the first frequencies, its column times the
    others."""
    down = mx.broadcast_to(mx.arange(rows)[:, None, None] * of_row, (rows, columns, of_row.size))
    across = mx.broadcast_to(mx.arange(columns)[None, :, None] * of_column, (rows, columns, of_column.size))
    return mx.concatenate([down, across], axis=-1)
