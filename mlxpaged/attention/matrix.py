"""Variants of the matrix kernel for prompt chunks, and the ranges of keys that it takes. metal.py launches it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.tuning import CHUNK_PARTITION, Choice
from mlxpaged.attention.variants import MatrixTile, quantization_template

THREADS = 128
"""Four simdgroups: each multiplies 8 of 32 keys, and a quarter of the columns of 32 values."""

KEYS = THREADS // 32 * 8
"""Keys in a step of the kernel's loop."""

PITCH = KEYS + 4
"""Scores from a row to the next one."""

ROWS = (32, 16, 8)
"""Rows (query tokens x heads) of a threadgroup, as many as fit its memory and registers."""

MAX_SUMS = 64
"""Most sums in the registers of a thread."""

MIN_RANGE = 512
"""Fewest keys of a range, but for the last one. Each range costs a row of float32 results per query token and head."""

THREADGROUPS = 256
"""Threadgroups that a chunk is split into if its context is long: several for each of the 40 to 80 cores of a large
GPU. An estimate, no Mac has measured it."""


class QueryTile(NamedTuple):
    """What the plan of a step depends on. queries: tokens of a tile; threadgroups: for the heads of these tokens."""

    queries: int
    threadgroups: int


class MatrixVariant(MatrixTile):
    """One instantiation of matrix_attention.metal."""

    name = "matrix_attention"
    threads = THREADS

    @functools.cached_property
    def tile(self) -> QueryTile:
        return QueryTile(self.queries, self.layout.num_kv_heads * self.head_tiles)

    @property
    def sums(self) -> int:
        """Sums of a thread: four columns of a row in each pair of matrices."""
        pairs = -(-self.layout.value_size // 16)
        return self.rows // 8 * -(-pairs // (THREADS // 32)) * 4

    @property
    def threadgroup_memory(self) -> int:
        """Bytes: the query tile in whole pairs of matrices, two tiles of scores, three numbers per row."""
        query_tile = self.rows * -(-self.layout.key_size // 16) * 16 * int(self.layout.dtype.size)
        return query_tile + 4 * self.rows * (2 * PITCH + 3)

    @functools.cached_property
    def template(self) -> kernels.Template:
        layout = self.layout
        names = ("group", "heads", "rows", "partial", "softcap", "sinks", "chunked", "mutual")
        types = [("T", layout.dtype), ("O", mx.float32 if self.partial else layout.dtype)]
        sizes = [("DK", layout.key_size), ("DV", layout.value_size)]
        counts = [("KV_HEADS", layout.num_kv_heads), ("BLOCK", layout.block_size), ("THREADS", THREADS)]
        own = ((name.upper(), getattr(self, name)) for name in names)
        return [*types, *sizes, *counts, *quantization_template(layout), *own]


def choose_variant(layout: KVLayout, group: int, *flags: bool) -> MatrixVariant | None:
    """The most rows that fit; None if no rows of such large heads do, or for latents, which have a kernel of their own.
    All heads of a group are in one threadgroup, or if they are more than the rows, in as few as possible. flags: the
    last fields of the variant."""
    for rows in ROWS if not layout.latent else ():
        heads = -(-group // -(-group // rows))
        variant = MatrixVariant(layout, group, heads, rows // heads, rows, *flags)
        if variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY and variant.sums <= MAX_SUMS:
            return variant
    return None


def with_partition(choice: Choice, tile: QueryTile | None, queries: int, keys: int) -> Choice:
    """The matrix kernel with a number of keys per threadgroup; the paged kernel if `tile` is None, because no variant
    fits. queries: tokens of the chunk, keys: those that its last token sees."""
    if tile is None:
        return Choice(CHUNK_PARTITION)
    threadgroups = -(-queries // tile.queries) * tile.threadgroups
    return replace(choice, partition=choice.partition or range_of_keys(threadgroups, keys))


def range_of_keys(threadgroups: int, keys: int) -> int:
    """Keys of each range, in whole steps of the kernel, if so many threadgroups would attend all `keys` keys."""
    ranges = max(1, min(THREADGROUPS // threadgroups, keys // MIN_RANGE))
    return max(MIN_RANGE, -(-keys // (ranges * KEYS)) * KEYS)
