"""Position embeddings of a grid, for an image that has other numbers of rows and columns.

The result is a sum of the grid's embeddings, weighted by row and by column. The weights are those of `interpolate` in
torch, with align_corners=False.
"""

from __future__ import annotations

import mlx.core as mx

CUBIC = -0.75
"""Parameter of torch's cubic convolution (aten/src/ATen/native/UpSample.h)."""


def interpolated(grid: mx.array, down: mx.array, across: mx.array) -> mx.array:
    """Returns [rows, columns, D] in float32. grid: [height, width, D]. down: [rows, height]. across:
    [columns, width]."""
    height, width, size = grid.shape
    lines = down @ grid.astype(mx.float32).reshape(height, width * size)
    return across @ lines.reshape(len(down), width, size)


def bilinear(count: int, size: int) -> mx.array:
    """Returns the weights [count, size] of `size` places for each of `count`, with antialias=True: the triangle is
    wider than a place if there are fewer places than before."""
    scale = size / count
    centres = (mx.arange(count) + 0.5) * scale
    distances = mx.abs(mx.arange(size)[None] + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = mx.maximum(1 - distances, 0)
    return weights / weights.sum(axis=1, keepdims=True)


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
