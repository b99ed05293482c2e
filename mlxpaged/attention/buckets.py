"""Sizes of a step's arrays, rounded up, so that a growing context meets few shapes.

A shape that was met before needs no other kernel, and the graph of an earlier step can be replayed
(parts/graphs/step_graphs.py).
"""

from __future__ import annotations

LEAST = 8
"""MLX passes an array of fewer elements in the constant address space: that is another kernel, compiled when it is
first met (mlx/backend/common/metal_kernel.cpp)."""


def table_width(blocks: int) -> int:
    """Columns of block tables whose longest has that many blocks: a power of two. Only the upload grows with it."""
    return max(LEAST, 1 << (blocks - 1).bit_length())


def work_items(count: int) -> int:
    """Work items of a decode step: at most an eighth more, or 7 more if they are few. A threadgroup without keys costs
    little, but not nothing."""
    step = max(LEAST, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step
