"""Position embeddings of a grid, for an image that has other numbers of rows and columns.

The result is a sum of the grid's embeddings, weighted by row and by column. The weights are those of `interpolate` in
torch, with align_corners=False.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

CUBIC = -0.75
"""Parameter of torch's cubic convolution (aten/src/ATen/native/UpSample.h)."""

HALF = 0.5 + 1e-4
"""Values between two numbers get the larger one, as in Pillow. Those of float32 may be a little less than they are."""


def interpolated(grid: mx.array, down: mx.array, across: mx.array) -> mx.array:
    """Returns [rows, columns, D] in float32. grid: [height, width, D]. down: [rows, height]. across:
    [columns, width]."""
    height, width, size = grid.shape
    lines = down @ grid.astype(mx.float32).reshape(height, width * size)
    return across @ lines.reshape(len(down), width, size)


def bilinear(count: int, size: int) -> mx.array:
    """Returns the weights [count, size] of `size` places for each of `count`, with antialias=True: the triangle is
    wider than a place if there are fewer places than before."""
    return bilinear_part(count, size, slice(0, count))[1]


def bilinear_part(count: int, size: int, wanted: slice) -> tuple[slice, mx.array]:
    """Returns the weights [wanted, places] for some of `count`, and the places that they are for: all others weigh
    nothing."""
    scale = size / count
    reach = max(scale, 1.0)
    start = max(0, math.floor((wanted.start + 0.5) * scale - reach))
    end = min(size, math.ceil((wanted.stop - 0.5) * scale + reach))
    centres = (np.arange(wanted.start, wanted.stop) + 0.5) * scale  # in float64: they are subtracted
    distances = np.abs(np.arange(start, end) + 0.5 - centres[:, None]) / reach
    weights = np.maximum(1 - distances, 0)
    return slice(start, end), mx.array((weights / weights.sum(axis=1, keepdims=True)).astype(np.float32))


def resized_part(pixels: mx.array, height: int, width: int, rows: slice, columns: slice) -> mx.array:
    """Returns a rectangle of images as they are at another size, with bilinear weights. pixels: uint8 [n, H, W, 3], and
    the result. The width changes first, and the values are rounded, as in torch."""
    of_rows, down = bilinear_part(height, pixels.shape[1], rows)
    of_columns, across = bilinear_part(width, pixels.shape[2], columns)
    lines = weighted(across, pixels[:, of_rows, of_columns].transpose(2, 1, 0, 3))  # [columns, H, n, 3]
    return weighted(down, lines.swapaxes(0, 1)).transpose(2, 0, 1, 3)


def weighted(weights: mx.array, values: mx.array) -> mx.array:
    """weights: [count, size]. values: uint8 [size, ...]. It is one product: those of as many matrices as an
    image has lines, of 3 columns, were wrong on the CPU (MLX 0.32.4, 1,549 x 1,549 pixels)."""
    sums = weights @ values.astype(mx.float32).flatten(1)
    return mx.floor(sums + HALF).astype(mx.uint8).reshape(-1, *values.shape[1:])


def bicubic(count: int, size: int) -> mx.array:
    """Returns the weights [count, size] of `size` places for each of `count`, with antialias=False: four places have a
    weight, and those beyond an edge are the edge."""
    centres = (mx.arange(count) + 0.5) * (size / count) - 0.5
    places = mx.floor(centres)[:, None] + mx.arange(-1, 3)
    distances = mx.abs(centres[:, None] - places)
    near = ((CUBIC + 2) * distances - (CUBIC + 3)) * distances**2 + 1
    far = ((CUBIC * distances - 5 * CUBIC) * distances + 8 * CUBIC) * distances - 4 * CUBIC
    weights = mx.where(distances <= 1, near, far)
    taken = mx.clip(places, 0, size - 1)[:, :, None] == mx.arange(size)
    return (weights[:, :, None] * taken).sum(axis=1)
