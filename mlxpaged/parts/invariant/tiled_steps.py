"""Cuts a step into tiles of a fixed number of rows, for batch-invariant engines.

MLX chooses the kernel of a product by its shapes. So a row's rounding depends on how many rows the step has. Here,
every forward pass has the same shapes. Each row is one token with a context of its own, so a token of a prompt is
computed exactly as one that was sampled. docs/scheduling.md has the whole argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from mlxpaged.core.step import Row, Step

logger = logging.getLogger(__name__)

TILE_SIZES = (8, 4, 2, 1)
"""Rows of a tile; the first one that `largest_tile` finds right is taken. A decoding sequence alone pays for a whole
tile, and a prompt reads all weights once for each tile. OpenBLAS computes up to 8 rows alike, and of 12 or more some in
another order. MLX's kernels for quantized weights read the weights once for 8 rows (quantized.cpp of its Metal
backend)."""

Forward = Callable[[Step], mx.array]
"""The logits of a tile's rows, all of which sample."""


def row_tiles(step: Step, size: int) -> Iterator[Step]:
    """The tiles of a step, in the order of its tokens. A token attends to those of earlier tiles and of its own one.
    The logits of the rows that fill the last tile are not wanted."""
    rows = [one for row in step.rows for one in row.tokens()]
    for first in range(0, len(rows), size):
        tile = rows[first : first + size]
        num_repeats = size - len(tile)
        repeated = tile[-1]._replace(logits=range(0), num_sampled=0)
        yield Step([*tile, *[repeated] * num_repeats], num_repeats=num_repeats)


def largest_tile(forward: Forward, num_groups: int) -> int:
    """The largest tile size for which a row has the same logits, to the bit, at every place of its tile.

    Computes a prompt twice in the first block, with its tokens in another order: each row is then at the next place and
    beside other rows. num_groups: of the block tables.
    """
    for size in TILE_SIZES:
        tables = np.zeros((num_groups, 1), np.int32)
        rows = Row(0, 0, range(size), range(size), num_sampled=size, tables=tables).tokens()
        logits = forward(Step(rows, num_repeats=0))
        moved = forward(Step(rows[-1:] + rows[:-1], num_repeats=0))
        if bool(mx.array_equal(mx.concatenate([logits[-1:], logits[:-1]]), moved, equal_nan=True)):
            logger.info("batch-invariant: each forward pass has %d rows", size)
            return size
    raise RuntimeError("two forward passes of one row differ: this device is not deterministic")
