"""Cuts a step's query tokens and their keys into work items. A threadgroup of paged_attention.metal takes one item."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxpaged.attention.buckets import work_items
from mlxpaged.attention.metadata import Upload
from mlxpaged.attention.pool import Locality
from mlxpaged.attention.tuning import Ranges
from mlxpaged.core.step import Step

ITEM, POSITION, BEGIN, END = 8, 3, 4, 5
"""Elements of an item, and the indices of some of them."""

NEVER = 2**31
"""More steps than any sequence has."""


class Growth(NamedTuple):
    """How the items of a decode step change while each of its sequences gets one token a step: some elements grow by
    one. moving: their indices in the flat items. steps: how often, until a sequence has another range."""

    moving: npt.NDArray[np.int64]
    steps: int


@dataclass(frozen=True)
class TileSchedule:
    """items[num_items, 8] and ranges[max(num_rows, 2), 4] are laid out as the kernels' headers say. Here are their
    indices in the step's upload.

    ranges is None if each tile has all its keys in one item: then nothing is merged. num_rows: query tokens.
    num_partials: rows before merging. If all query tiles are one token, numbers of ranges are rounded up: items without
    keys have rows of their own, which are not merged. growth: None unless all query tiles are one token.
    """

    items: int
    ranges: int | None
    num_items: int
    num_rows: int
    num_partials: int
    growth: Growth | None = field(default=None, compare=False)


def make_schedule(
    step: Step,
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
    query_lens = np.asarray(step.query_lens)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    runs = runs_of(step, members, locality)
    tiles = -(-runs.lens // queries)
    run = np.repeat(np.arange(len(tiles)), tiles)
    sequence, last_key = runs.sequences[run], runs.last_keys[run]
    in_run = counts_from_zero(tiles) * queries
    offset = runs.offsets[run] + in_run  # of a tile's first token in its sequence's query tokens
    count = np.minimum(queries, runs.lens[run] - in_run)
    position = np.asarray(step.context_lens)[sequence] - query_lens[sequence] + offset
    first_key = locality.first_key(position)
    end_key = np.maximum(position + count, last_key + 1)
    keys = end_key - first_key
    size = partition.sizes(keys) if isinstance(partition, Ranges) else np.full_like(keys, partition)
    is_whole = size >= keys if isinstance(partition, Ranges) else np.zeros_like(keys, bool)
    size = np.where(is_whole, end_key, size)
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
            last_key[tile],
        ],
        axis=1,
    )
    growth = None
    if queries == 1:
        end_of_first, left = (first_range + 1) * size, (first_range + parts) * size - end_key
        if isinstance(partition, Ranges):  # longer contexts have longer ranges
            stays_whole = locality.window is not None and locality.window <= partition.most_whole
            more = np.full_like(keys, NEVER) if stays_whole else partition.most_whole - keys
            left = np.where(is_whole, more, np.minimum(left, partition.most_keys(size) - keys))
            end_of_first = np.where(is_whole, NEVER, end_of_first)
        growth = make_growth(locality, position, first_key, end_of_first, parts, left)
    num_rows, num_partials = int(runs.lens.sum()), int((parts * count).sum())
    if parts.max() == 1 and not always_merge:
        return TileSchedule(upload.add(items.astype(np.int32)), None, len(items), num_rows, num_partials, growth)
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
    return TileSchedule(*indices, len(items), num_rows, num_partials, growth)


class Runs(NamedTuple):
    """Runs of query tokens. A tile has tokens of one run. offsets: of their first tokens in the query tokens of their
    sequences. last_keys: of the images that they are part of if its tokens see one another, else 0."""

    sequences: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lens: npt.NDArray[np.int64]
    last_keys: npt.NDArray[np.int64]


def runs_of(step: Step, members: npt.NDArray[np.int64], locality: Locality) -> Runs:
    """The query tokens of each sequence are one run. If tokens of images see one another, each image is a run, and so
    is the text between them."""
    lens = np.asarray(step.query_lens)[members]
    if not locality.looks_ahead(step, members):
        return Runs(members, np.zeros_like(lens), lens, np.zeros_like(lens))
    runs = []
    for i, query_len in zip(members.tolist(), lens.tolist(), strict=True):
        first, at = step.context_lens[i] - query_len, 0
        for start, end in step.spans.get(i, ()):
            begin = max(0, start - first)
            runs += [(i, at, begin - at, 0), (i, begin, end - first - begin, end - 1)]
            at = end - first
        runs.append((i, at, query_len - at, 0))
    return Runs(*np.array([run for run in runs if run[2]]).T)


def make_growth(
    locality: Locality,
    position: npt.NDArray[np.int64],
    first_key: npt.NDArray[np.int64],
    end_of_first: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
) -> Growth:
    """The arguments have one entry for each sequence. end_of_first: end of its first range. parts: its ranges. left:
    how many keys its last range has room for."""
    last = np.cumsum(parts) - 1
    moving = [np.arange(last[-1] + 1) * ITEM + POSITION, last * ITEM + END]
    if locality.chunk is not None:
        left = np.minimum(left, locality.chunk - 1 - position % locality.chunk)
    if locality.window is not None:
        moves = position >= locality.window - 1
        left = np.minimum(left, np.where(moves, end_of_first - 1 - first_key, locality.window - 1 - position))
        moving.append((last - parts + 1)[moves] * ITEM + BEGIN)
    return Growth(np.concatenate(moving), int(left.min()))


def counts_from_zero(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ..., n - 1 for each n of `counts`, concatenated."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
