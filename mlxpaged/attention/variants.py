"""The instantiations of the attention kernels: template arguments, and what they need of registers and memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.layout import KVLayout

BLOCK_SIZES = (8, 16, 32)

THREADS = 128

DECODE_THREADS = 256
"""Threads of a threadgroup of the decode kernel: eight simdgroups. Any Mac runs 384 threads with all registers of
each."""

FULL_DEVICE = 1024
"""Simdgroups with which a device is busy: a Mac has up to 80 cores. With fewer, a threadgroup serves one query head, so
that there are more of them. They read the keys once for each head then, but from cache."""

MOST_HEAD_TILES = 2
"""Most threadgroups among which the query heads of a KV head are divided because of registers. Each reads the keys."""

VECTOR = 4
"""Elements of a head that a thread loads at once, as `vec<T, 4>`."""

MAX_KEY_FLOATS = 40
"""Most elements of a key in the registers of a lane, beside the sums."""

MAX_SUMS = 64
"""Most sums in the registers of a thread."""

MAX_KEY_SIZE = 32 * MAX_KEY_FLOATS
MAX_VALUE_SIZE = THREADS * VECTOR

LARGE_HEAD = 512

ROWS = 32
"""Most rows (query tokens x heads) of a tile. Their outputs are in its registers, 32 to 64 per thread."""

LATENT_THREADS = 384
"""Twelve simdgroups, as many as any Mac runs with all registers of each thread. They share the 36 pairs of matrices of
a row of 576 elements equally."""

LATENT_KEYS = 16
"""Keys in a step of the kernel for latents. Each simdgroup has its columns of them in registers."""

LATENT_ROWS = (24, 16, 8)
"""Most rows (query tokens x heads) of a tile of latents: each has a thread for each of the 16 keys."""

MAX_REGISTERS = 114
"""Elements in the registers of a thread, which has 128, beside addresses and a matrix."""

SPLIT_BYTES = 8192
"""Most bytes of threadgroup memory in which the simdgroups of the decode kernel merge. With more, fewer threadgroups
are resident at once; with less, there are more barriers at the end."""


@dataclass(frozen=True)
class TileVariant:
    """One instantiation of paged_attention.metal. group: query heads of a KV head; heads: how many of them one
    threadgroup serves; queries: tokens of its tile."""

    layout: KVLayout
    group: int
    heads: int
    queries: int
    partial: bool = False
    softcap: bool = False
    sinks: bool = False
    chunked: bool = False
    mutual: bool = False

    name = "paged_attention"
    threads = THREADS

    @property
    def rows(self) -> int:
        return self.queries * self.heads

    @property
    def head_tiles(self) -> int:
        return -(-self.group // self.heads)

    @property
    def tile(self) -> int:
        """Keys whose scores are in threadgroup memory at once."""
        return 128 if self.rows <= 16 else 64

    @property
    def vec(self) -> int:
        """Output columns per thread, a power of two, so that a thread keeps 32 to 64 sums in its registers; with 4-bit
        values at least two, which are a byte."""
        kind = self.layout.quantization
        fewest = max(-(-self.layout.value_size // THREADS), 1 if kind is None else 8 // kind.value_bits)
        return max(4 if self.rows <= 8 else 2 if self.rows <= 16 else 1, power_of_two(fewest))

    @property
    def lanes(self) -> int:
        """Lanes that share a key."""
        lanes = 8 if self.layout.key_size % 32 == 0 else 4
        while key_floats(self.layout, lanes) > MAX_KEY_FLOATS:
            lanes *= 2
        return lanes

    @property
    def threadgroup_memory(self) -> int:
        """Bytes: the query tile, the scores (later the splits' sums in the same place), three numbers per row."""
        layout = self.layout
        splits = THREADS // (layout.value_size // self.vec)
        scratch = max(self.rows * self.tile, splits * layout.value_size)
        return bytes_of(self.rows * layout.key_size * layout.dtype.size, 4 * scratch, *[4 * self.rows] * 3)

    @functools.cached_property
    def template(self) -> kernels.Template:
        names = ("heads", "queries", "tile", "vec", "lanes", "softcap", "sinks", "chunked", "mutual")
        return [*common_template(self), *((name.upper(), getattr(self, name)) for name in names)]


@dataclass(frozen=True)
class DecodeVariant:
    """One instantiation of paged_decode.metal. group: query heads of a KV head; heads: how many of them one threadgroup
    serves, a divisor of the group."""

    layout: KVLayout
    group: int
    heads: int
    partial: bool = False
    softcap: bool = False
    sinks: bool = False

    name = "paged_decode"
    threads = DECODE_THREADS

    @property
    def head_tiles(self) -> int:
        return self.group // self.heads

    @property
    def tile(self) -> int:
        """Keys that a simdgroup takes at once. The fewer query heads there are, the more simdgroups they need."""
        return 16 if self.group * self.layout.num_kv_heads >= 16 else 8

    @property
    def shortest_range(self) -> int:
        """Keys of which each simdgroup has a tile."""
        return self.threads // 32 * self.tile

    @property
    def lanes(self) -> int:
        """Lanes that share a key: as few as hold it with 16 elements each."""
        lanes = 4
        while lanes < 32 and key_floats(self.layout, lanes) > 16:
            lanes *= 2
        return lanes

    @property
    def keys(self) -> int:
        """Keys of a lane at once."""
        return 2 if key_floats(self.layout, self.lanes) <= 16 and self.tile * self.lanes >= 64 else 1

    @property
    def column_lanes(self) -> int:
        """Lanes that share a value. The others take other keys."""
        return min(32, max(32 // self.tile, power_of_two(-(-self.layout.value_size // VECTOR))))

    @property
    def value_chunks(self) -> int:
        return -(-self.layout.value_size // (VECTOR * self.column_lanes))

    @property
    def sums(self) -> int:
        """Sums in the registers of a lane."""
        return VECTOR * self.heads * self.value_chunks

    @property
    def values(self) -> int:
        """Values of a lane at once: up to 32 elements, or 16 beside many sums."""
        most = (8 if self.sums <= MAX_SUMS // 2 else 4) // self.value_chunks
        return max(1, min(most, self.tile * self.column_lanes // 32))

    @property
    def rows_at_once(self) -> int:
        """Heads that the simdgroups merge at once."""
        return max(1, min(self.heads, SPLIT_BYTES // (self.threads // 32 * 4 * self.layout.value_size)))

    @property
    def scratch(self) -> int:
        """Vectors of four floats."""
        return self.threads // 32 * max(self.heads * self.tile, self.rows_at_once * self.layout.value_size) // 4

    @property
    def threadgroup_memory(self) -> int:
        """Bytes: the query heads, the scores (later sums in the same place), two numbers per simdgroup and head."""
        layout, numbers = self.layout, self.threads // 32 * self.heads * 4
        return bytes_of(self.heads * layout.key_size * layout.dtype.size, 16 * self.scratch, numbers, numbers)

    @property
    def fits(self) -> bool:
        return self.sums <= MAX_SUMS and self.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY

    @functools.cached_property
    def template(self) -> kernels.Template:
        sizes = ("heads", "tile", "lanes", "keys", "column_lanes", "values", "rows_at_once", "scratch")
        names = (*sizes, "softcap", "sinks")
        return [*common_template(self), *((name.upper(), getattr(self, name)) for name in names)]


@dataclass(frozen=True)
class MatrixTile:
    """Arguments of a kernel that attends with simdgroup matrices. group: query heads of a KV head; heads: how many of
    them one threadgroup serves; queries: tokens of its tile; rows: of the tile's matrices, at least queries * heads."""

    layout: KVLayout
    group: int
    heads: int
    queries: int
    rows: int
    partial: bool = False
    softcap: bool = False
    sinks: bool = False
    chunked: bool = False
    mutual: bool = False

    @property
    def head_tiles(self) -> int:
        return -(-self.group // self.heads)


class LatentVariant(MatrixTile):
    """One instantiation of latent_attention.metal."""

    name = "latent_attention"
    threads = LATENT_THREADS

    @property
    def registers(self) -> int:
        """Elements in the registers of a lane: sums, queries, keys and scores. It has four columns of each of its pairs
        of matrices."""
        layout, row_tiles = self.layout, self.rows // 8
        pairs = -(-layout.value_size // 16) + -(-(layout.key_size - layout.value_size) // 16)
        columns = -(-pairs // (self.threads // 32)) * VECTOR
        of_pool = columns * (row_tiles + LATENT_KEYS // 8) * layout.dtype.size // 4
        return row_tiles * columns + of_pool + row_tiles * 2

    @property
    def threadgroup_memory(self) -> int:
        """Bytes: the scores of each simdgroup, the weights, three numbers per row."""
        scores = self.threads // 32 * LATENT_KEYS * (self.rows + 2)
        return bytes_of(4 * scores, 4 * self.rows * (LATENT_KEYS + 4), *[4 * self.rows] * 3)

    @functools.cached_property
    def template(self) -> kernels.Template:
        names = ("heads", "rows", "softcap", "sinks", "chunked", "mutual")
        return [*common_template(self), *((name.upper(), getattr(self, name)) for name in names)]


Variant = TileVariant | DecodeVariant | LatentVariant


def common_template(variant: Variant) -> kernels.Template:
    layout = variant.layout
    types = [("T", layout.dtype), ("O", mx.float32 if variant.partial else layout.dtype)]
    sizes = [("DK", layout.key_size), ("DV", layout.value_size), ("GROUP", variant.group)]
    counts = [("KV_HEADS", layout.num_kv_heads), ("BLOCK", layout.block_size), ("THREADS", variant.threads)]
    return [*types, *sizes, *counts, *quantization_template(layout), ("PARTIAL", variant.partial)]


def quantization_template(layout: KVLayout) -> kernels.Template:
    """Arguments of the kernels for quantized pools. SCALES: elements of a row of scales; KEY_SCALES: those of a key."""
    if (kind := layout.quantization) is None:
        return []
    groups = [("KEY_BITS", kind.key_bits), ("KEY_GROUP", kind.key_group)]
    groups += [("VALUE_BITS", kind.value_bits), ("VALUE_GROUP", kind.value_group)]
    scales = kind.num_scales(layout.key_size, layout.value_size)
    return [*groups, ("SCALES", scales), ("KEY_SCALES", 2 * (layout.key_size // kind.key_group))]


def choose_tile(
    layout: KVLayout, group: int, *flags: bool, single_queries: bool = False
) -> TileVariant | LatentVariant:
    """Put all heads of a group in one threadgroup if they fit its memory and registers, else in as few as possible.
    flags: the last fields of the variant. single_queries: tiles of one token."""
    if layout.latent:
        return choose_latent(layout, group, *flags, single_queries=single_queries)
    rows = ROWS
    while True:
        heads = -(-group // -(-group // rows))
        queries = 1 if single_queries else max(1, rows // heads)
        variant = TileVariant(layout, group, heads, queries, *flags)
        in_memory = variant.threadgroup_memory <= kernels.MAX_THREADGROUP_MEMORY
        if in_memory and variant.rows * variant.vec <= MAX_SUMS:
            return variant
        rows //= 2


def choose_decode(layout: KVLayout, group: int, *flags: bool, by_head: bool = False, few: bool = False) -> Variant:
    """The decode kernel with as many heads of a group as fit the registers of a simdgroup, else tiles of one token.
    flags: the last fields of a TileVariant. by_head: if it is the decode kernel, a threadgroup serves one head. few: it
    serves half as many as fit."""
    for head_tiles in range(1, MOST_HEAD_TILES + 1) if not layout.latent else ():
        variant = DecodeVariant(layout, group, group // head_tiles, *flags[:3])
        if group % head_tiles == 0 and variant.fits:
            heads = 1 if by_head else variant.heads // 2 if few and variant.heads % 2 == 0 else variant.heads
            return replace(variant, heads=heads)
    return choose_tile(layout, group, *flags, single_queries=True)


def may_spill(layout: KVLayout, group: int) -> bool:
    """Whether the decode kernel has so many sums that a thread of 128 registers may keep some of them in memory. By the
    allocation of a stand-in, that is so at head size 512 alone: 184 bytes with four heads, 48 with two."""
    variant = choose_decode(layout, group)
    return isinstance(variant, DecodeVariant) and layout.value_size >= LARGE_HEAD and variant.heads >= 4


def choose_latent(layout: KVLayout, group: int, *flags: bool, single_queries: bool) -> LatentVariant:
    """The most rows whose numbers fit the registers, at least eight."""
    for rows in LATENT_ROWS:
        heads = -(-group // -(-group // rows))
        queries = 1 if single_queries else rows // heads
        variant = LatentVariant(layout, group, heads, queries, -(-queries * heads // 8) * 8, *flags)
        if variant.registers <= MAX_REGISTERS:
            break
    return variant


def key_floats(layout: KVLayout, lanes: int) -> int:
    """Elements of a key in the registers of a lane."""
    return -(-layout.key_size // (VECTOR * lanes)) * VECTOR


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << (number - 1).bit_length()


def bytes_of(*arrays: int) -> int:
    """Bytes that arrays take in threadgroup memory, each aligned to 16 bytes."""
    return sum(-(-size // 16) * 16 for size in arrays)
