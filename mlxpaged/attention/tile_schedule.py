"""Cuts a step's query tokens and their keys into work items. A threadgroup of paged_attention.metal takes one item."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxpaged.attention.buckets import work_items
from mlxpaged.attention.metadata import HostMetadata, Upload
from mlxpaged.attention.pool import Locality
from mlxpaged.attention.tuning import Ranges


@dataclass(frozen=True)
class TileSchedule:
    """items[num_items, 8] and ranges[max(num_rows, 2), 4] are laid out as the kernels' headers say. Here are their
    indices in the step's upload.

    ranges is None if each tile has all its keys in one item: then nothing is merged. num_rows: query tokens.
    num_partials: rows before merging. If all query tiles are one token, numbers of ranges are rounded up: items without
    keys have rows of their own, which are not merged.
    """

    items: int
    ranges: int | None
    num_items: int
    num_rows: int
    num_partials: int


def make_schedule(
    meta: HostMetadata,
    members: npt.NDArray[np.int64],
    locality: Locality,
    queries: int,
    partition: int | Ranges,
    upload: Upload,
    always_merge: bool = False,
) -> TileSchedule:
    """Tiles of up to `queries` tokens of the sequences `members`, and ranges of up to `partition` keys of each tile.
    Ranges end at multiples of their size, so that few blocks are in two ranges, but a range of all keys ends with them.
    always_merge: results are merged even if no tile has several ranges, so that a tile's rounding does not depend on
    the others."""
    query_lens = np.asarray(meta.host_query_lens)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    lens = query_lens[members]
    tiles = -(-lens // queries)
    sequence = np.repeat(members, tiles)
    offset = counts_from_zero(tiles) * queries  # of a tile's first token in its sequence's query tokens
    count = np.minimum(queries, query_lens[sequence] - offset)
    position = np.asarray(meta.host_context_lens)[sequence] - query_lens[sequence] + offset
    first_key = locality.first_key(position)
    end_key = position + count
    keys = end_key - first_key
    size = partition.sizes(keys) if isinstance(partition, Ranges) else np.full_like(keys, partition)
    if isinstance(partition, Ranges):
        size = np.where(size >= keys, end_key, size)
    first_range = first_key // size
    parts = -(-end_key // size) - first_range
    first_partial = np.cumsum(parts * count) - parts * count

    tile = np.repeat(np.arange(len(sequence)), parts)
    part = counts_from_zero(parts)
    begin = (first_range[tile] + part) * size[tile]
    items = np.stack(
        [
            sequence[tile],
            (starts[sequence] + offset)[tile],
            count[tile],
            position[tile],
            np.maximum(begin, first_key[tile]),
            np.minimum(begin + size[tile], end_key[tile]),
            first_partial[tile] + part * count[tile],
            np.zeros_like(tile),
        ],
        axis=1,
    )
    num_rows, num_partials = int(lens.sum()), int((parts * count).sum())
    if parts.max() == 1 and not always_merge:
        return TileSchedule(upload.add(items.astype(np.int32)), None, len(items), num_rows, num_partials)
    row_tile = np.repeat(np.arange(len(sequence)), count)
    ranges = np.zeros((max(num_rows, 2), 4), np.int32)  # MLX passes fewer than 8 elements in the constant address space
    ranges[:num_rows, 0] = first_partial[row_tile] + counts_from_zero(count)
    ranges[:num_rows, 1] = count[row_tile]
    ranges[:num_rows, 2] = parts[row_tile]
    if queries == 1:
        empty = np.zeros((work_items(len(items)) - len(items), 8), items.dtype)
        empty[:, 2] = 1
        empty[:, 6] = num_partials + np.arange(len(empty))
        items = np.concatenate([items, empty])
        num_partials += len(empty)
    indices = upload.add(items.astype(np.int32)), upload.add(ranges)
    return TileSchedule(*indices, len(items), num_rows, num_partials)


def counts_from_zero(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ..., n - 1 for each n of `counts`, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
