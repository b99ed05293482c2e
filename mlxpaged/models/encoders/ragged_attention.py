"""Attention of whole texts in both directions, in a step that has their tokens one after the other without padding.

Texts of near length attend together: their keys are gathered into [texts, longest], and a mask hides what is beyond a
text. Only these gathered keys and queries are padded. The other operations of a layer run on the tokens as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

NEAR = 0.8
"""Texts attend together if the shortest has at least this share of the longest one's tokens."""

MAX_SCORES = 2**24
"""Scores of one call: tokens times keys times heads. MLX stores them if it has no fused kernel for the head size, and
always on a CPU: 67 MB in float32."""

Rows = NDArray[np.int32]

Bias = Callable[[mx.array], mx.array]
"""Positions of keys minus those of queries, [1 or B, Q, K] -> what is added to the scores, [1 or B, heads, Q, K]"""


@dataclass(frozen=True)
class Block:
    """Queries of one text, and the keys that they may attend to, as rows of the step: first and number."""

    query: int
    num_queries: int
    key: int
    num_keys: int

    def of(self, rows: range) -> Block | None:
        """The same keys for those of its queries that are among `rows`; None if none is."""
        first, last = max(self.query, rows.start), min(self.query + self.num_queries, rows.stop)
        return Block(first, last - first, self.key, self.num_keys) if first < last else None


@dataclass(frozen=True)
class Group:
    """Blocks that attend in one call. queries[B, Q], keys[B, K]: rows of the step; a slice if they follow each other.
    mask: what is added to the scores, or which keys count, [1 or B, 1 or heads, Q or 1, K]; None if all do."""

    queries: slice | mx.array
    keys: slice | mx.array
    size: int
    num_queries: int
    num_keys: int
    mask: mx.array | None

    def attend(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """q, k, v[T, heads, D] -> [B * Q, heads * D]"""
        queries = self._taken(q, self.queries, self.num_queries)
        keys, values = (self._taken(each, self.keys, self.num_keys) for each in (k, v))
        mask = self.mask
        if mask is not None and mask.dtype != mx.bool_:
            mask = mask.astype(q.dtype)  # a file may have its bias in another type
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return out.transpose(0, 2, 1, 3).reshape(self.size * self.num_queries, -1)

    def _taken(self, x: mx.array, rows: slice | mx.array, length: int) -> mx.array:
        """[T, heads, D] -> [B, heads, length, D]"""
        return x[rows].reshape(self.size, length, *x.shape[1:]).transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class Attention:
    """The calls of one kind of layer in a step, for R of its T rows. order[R]: the row of each in what they give one
    after the other; None if it is the order of the step."""

    groups: Sequence[Group]
    order: mx.array | None

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """q, k, v[T, heads, D] -> [R, heads * D]"""
        found = [group.attend(q, k, v, scale) for group in self.groups]
        joined = found[0] if len(found) == 1 else mx.concatenate(found)
        return joined if self.order is None else joined[self.order]


def plan_attention(
    lengths: Sequence[int],
    heads: int,
    window: int | None = None,
    bias: Bias | None = None,
    rows: range | None = None,
) -> Attention:
    """lengths: of the step's texts, in tokens. window: the most positions between a token and one that it attends to;
    None for the whole text. bias: what relative positions add to the scores. rows: those that attend, None for all;
    the result has these only."""
    rows = range(sum(lengths)) if rows is None else rows
    found: list[Block] = []
    for start, length in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True):
        found += (part for block in blocks_of(start, length, heads, window) if (part := block.of(rows)) is not None)
    found.sort(key=lambda block: (-block.num_keys, -block.num_queries, block.query))
    groups, places, end = [], np.zeros(len(rows), np.int32), 0
    for blocks in near(found, heads):
        groups.append(group_of(blocks, window, bias))
        for index, block in enumerate(blocks):
            first = end + index * groups[-1].num_queries
            query = block.query - rows.start
            places[query : query + block.num_queries] = np.arange(first, first + block.num_queries)
        end += groups[-1].size * groups[-1].num_queries
    in_order = end == len(places) and bool((places == np.arange(end)).all())
    return Attention(groups, None if in_order else mx.array(places))


def blocks_of(start: int, length: int, heads: int, window: int | None) -> Iterator[Block]:
    """The blocks of a text whose first row is `start`: one, unless most keys are outside of the window, or there are
    more scores than MAX_SCORES."""
    size, reach = max(1, MAX_SCORES // (heads * length)), length
    if window is not None and keys_per_query(length, window) < length:
        size, reach = 2 * window, window
    if size >= length:
        size = length
    for first in range(0, length, size):
        last = min(first + size, length)
        begin, end = max(0, first - reach), min(length, last + reach)
        yield Block(start + first, last - first, start + begin, end - begin)


def keys_per_query(length: int, window: int | None) -> int:
    """Keys that are computed for a token of a text of this length, those outside of the window included."""
    return length if window is None else min(length, 4 * window)


def near(blocks: Sequence[Block], heads: int) -> Iterator[Sequence[Block]]:
    """The blocks, sorted by falling sizes, in groups of near sizes with at most MAX_SCORES scores, or of one."""
    group: list[Block] = []
    for block in blocks:
        if group:
            first = group[0]
            queries = max(first.num_queries, block.num_queries)
            is_near = block.num_keys >= NEAR * first.num_keys and block.num_queries >= NEAR * first.num_queries
            if not is_near or (len(group) + 1) * queries * first.num_keys * heads > MAX_SCORES:
                yield group
                group = []
        group.append(block)
    yield group


def group_of(blocks: Sequence[Block], window: int | None, bias: Bias | None) -> Group:
    first_queries, num_queries, first_keys, num_keys = (
        np.array([getattr(block, name) for block in blocks], np.int32)[:, None]
        for name in ("query", "num_queries", "key", "num_keys")
    )
    queries, keys = np.arange(num_queries.max()), np.arange(num_keys.max())
    mask = None
    if (num_keys != num_keys.max()).any():
        mask = (keys[None] < num_keys)[:, None, None, :]
    shown = None
    if window is not None or bias is not None:  # otherwise distances do not count, and there may be many
        shifts = first_keys - first_queries
        shifts = shifts[:1] if (shifts == shifts[0]).all() else shifts
        distances = (shifts[:, :, None] + keys[None, None, :] - queries[None, :, None]).astype(np.int32)
        if window is not None and np.abs(distances).max() > window:
            inside = (np.abs(distances) <= window)[:, None]
            mask = inside if mask is None else mask & inside
        shown = None if bias is None else bias(mx.array(distances))
    if mask is not None:
        allowed = mx.array(mask)
        shown = allowed if shown is None else mx.where(allowed, shown, mx.array(-mx.inf, shown.dtype))
    # Rows after the end of a text are those of its last token: their scores are hidden, and their states dropped.
    return Group(
        queries=rows_of(first_queries + np.minimum(queries, num_queries - 1)),
        keys=rows_of(first_keys + np.minimum(keys, num_keys - 1)),
        size=len(blocks),
        num_queries=len(queries),
        num_keys=len(keys),
        mask=shown,
    )


def rows_of(rows: Rows) -> slice | mx.array:
    """A slice is a view, and needs no gather."""
    flat = rows.reshape(-1)
    first = int(flat[0])
    if (flat == np.arange(first, first + len(flat))).all():
        return slice(first, first + len(flat))
    return mx.array(flat)
