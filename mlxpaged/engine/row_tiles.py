"""Cuts a step into tiles of a fixed number of rows, for batch-invariant engines.

MLX chooses the kernel of a product by its shapes. So a row's rounding depends on how many rows the step has. Here,
every forward pass has the same shapes. Each row is one token with a context of its own, so a token of a prompt is
computed exactly as one that was sampled. docs/scheduling.md has the whole argument.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxpaged.attention.metadata import IntArray
from mlxpaged.scheduler.batch import Batch, ScheduledSequence
from mlxpaged.scheduler.sequence import Sequence

logger = logging.getLogger(__name__)

TILE_SIZES = (8, 4, 2, 1)
"""Rows of a tile; the first one that `largest_tile` finds right is taken. A decoding sequence alone pays for a whole
tile, and a prompt reads all weights once for each tile. OpenBLAS computes up to 8 rows alike, and of 12 or more some in
another order. MLX's kernels for quantized weights read the weights once for 8 rows (quantized.cpp of its Metal
backend)."""

Forward = Callable[[Batch, IntArray], mx.array]
"""The logits of a tile's rows, all of which sample."""


class RowTile(NamedTuple):
    """batch: rows of one token each. owners: for each row, the index of its row in the step. num_repeats: how many rows
    at the end repeat the one before them. They fill the tile, and their logits are not read."""

    batch: Batch
    owners: list[int]
    num_repeats: int


def row_tiles(batch: Batch, size: int) -> Iterator[RowTile]:
    """The tiles of a step, in the order of its tokens. A token attends to those of earlier tiles and of its own one."""
    rows: list[ScheduledSequence] = []
    owners: list[int] = []
    for i, row in enumerate(batch.rows):
        for start in range(row.start, row.context_len):
            is_last = start + 1 == row.context_len
            predicted = range(start + 1, start + 2) if start + 1 in row.prompt_logprobs else range(0)
            rows.append(
                row._replace(start=start, num_tokens=1, samples=row.samples and is_last, prompt_logprobs=predicted)
            )
            owners.append(i)
    for first in range(0, len(rows), size):
        tile = rows[first : first + size]
        num_repeats = size - len(tile)
        repeated = tile[-1]._replace(samples=False, prompt_logprobs=range(0))
        owned = owners[first : first + size]
        yield RowTile(Batch((*tile, *[repeated] * num_repeats)), owned + owned[-1:] * num_repeats, num_repeats)


def largest_tile(forward: Forward, num_groups: int) -> int:
    """The largest tile size for which a row has the same logits, to the bit, at every place of its tile.

    Computes a prompt twice in the first block, with its tokens in another order: each row is then at the next place and
    beside other rows. num_groups: of the block tables.
    """
    for size in TILE_SIZES:
        sequence = Sequence(0, list(range(size)), 1)
        rows = [ScheduledSequence(sequence, position, 1, samples=True) for position in range(size)]
        tables = np.zeros((num_groups, size, 1), np.int32)
        logits = forward(Batch(rows), tables)
        moved = forward(Batch(rows[-1:] + rows[:-1]), tables)
        if bool(mx.array_equal(mx.concatenate([logits[-1:], logits[:-1]]), moved, equal_nan=True)):
            logger.info("batch-invariant: each forward pass has %d rows", size)
            return size
    raise RuntimeError("two forward passes of one row differ: this device is not deterministic")
