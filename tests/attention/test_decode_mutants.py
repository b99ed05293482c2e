"""Mutants of paged_decode."""

from __future__ import annotations

from unittest import mock

import mlx.core as mx

from mlxpaged.attention import metal
from tests.attention.metal_cases import TOLERANCE, Case
from tests.attention.mutants import Mutant, mutant_tests
from tests.metal_on_cpu import (
    DataRace,
    Divergence,
    MetalCompileError,
    MetalError,
    OutOfBounds,
    ResourceLimit,
    UninitialisedOutput,
)


def error_together(case: Case) -> float:
    """If a threadgroup serves all heads of a KV head, as with many sequences."""
    with mock.patch.object(metal, "FULL_DEVICE", 0):
        return case.error()


def decode() -> bool:
    """Five tiles of 8 keys for each simdgroup, the last of them short, and rows of one tile."""
    case = Case([(1, 300), (1, 33), (1, 1)], head_dim=32, group=3, decode_partition=512)
    return error_together(case) <= TOLERANCE[case.dtype]


def lone_decode() -> bool:
    """A head in each threadgroup, and two tiles of 16 keys for some simdgroups."""
    case = Case([(1, 200)], head_dim=32, group=8)
    return case.error() <= TOLERANCE[case.dtype]


def sharp_decode() -> bool:
    case = Case([(1, 300), (1, 33)], head_dim=32, sharpness=1000, decode_partition=512)
    return error_together(case) < 1e-3


def wide_decode() -> bool:
    """The simdgroups merge two heads at a time."""
    case = Case([(1, 70)], head_dim=128, group=6, kv_heads=1, decode_partition=512)
    return error_together(case) <= TOLERANCE[case.dtype]


def decode_of_a_full_table() -> bool:
    """Eight blocks, in a table of eight columns."""
    case = Case([(1, 250)], head_dim=32, decode_partition=512)
    return case.error() <= TOLERANCE[case.dtype]


def capped_decode() -> bool:
    """A window that begins in the middle of a block and of a tile."""
    case = Case([(1, 300), (1, 33)], head_dim=32, window=40, softcap=2.0, has_sinks=True, decode_partition=512)
    return case.error() <= TOLERANCE[case.dtype]


def decode_of_small_blocks() -> bool:
    case = Case([(1, 100), (1, 33)], head_dim=64, block_size=8, group=8, decode_partition=512)
    return case.error() <= TOLERANCE[case.dtype]


def bfloat_decode() -> bool:
    case = Case([(1, 40)], head_dim=32, dtype=mx.bfloat16)
    return case.error() <= TOLERANCE[case.dtype]


def narrow_decode() -> bool:
    """Keys of 40: the four lanes of a key share ten vectors."""
    case = Case([(1, 40)], head_dim=40, kv_heads=1, group=1)
    return case.error() <= TOLERANCE[case.dtype]


SIMD_BARRIER = "  simdgroup_barrier(mem_flags::mem_threadgroup);\n"
UNROLL = "#pragma clang loop unroll(full)\n"
TOKEN = "if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0)"

MUTANTS: dict[str, Mutant] = {
    "no barrier before the softmax": (
        "paged_decode", SIMD_BARRIER + "\n  const bool visible", "\n  const bool visible", decode, DataRace),
    "no barrier before the values": (
        "paged_decode", SIMD_BARRIER + "\n" + UNROLL + "  for (int base = 0; base < TILE; base += VALUE_STEP",
        UNROLL + "  for (int base = 0; base < TILE; base += VALUE_STEP", decode, DataRace),
    "no barrier after the values": (
        "paged_decode", "  simdgroup_barrier(mem_flags::mem_threadgroup);  // the weights have been read\n", "",
        decode, DataRace),
    "no barrier after the query heads": (
        "paged_decode", "threadgroup_barrier(mem_flags::mem_threadgroup);\n\nfor (; start", "for (; start",
        decode, DataRace),
    "no barrier before the simdgroups merge": (
        "paged_decode", "threadgroup_barrier(mem_flags::mem_threadgroup);\n\n// The simdgroups'", "// The simdgroups'",
        decode, DataRace),
    "a reduction that some lanes skip": (
        "paged_decode", "simd_sum(weight);", "visible ? simd_sum(weight) : 0.0f;", decode, Divergence),
    "a key after the context": (
        "paged_decode", "start + lane < key_end;", "start + lane <= key_end;", decode, None),
    "keys before the window": (
        "paged_decode", "start + lane >= key_begin && ", "", capped_decode, None),
    "a value after the context": (
        "paged_decode", "position < key_end && (c * COLUMN_LANES", "position <= key_end && (c * COLUMN_LANES",
        decode, None),
    "denominator not rescaled": (
        "paged_decode", "denominator * factor + sum;", "denominator + sum;", sharp_decode, None),
    "lanes with other keys left out": (
        "paged_decode", "distance = COLUMN_LANES; distance < 32", "distance = COLUMN_LANES; distance < 16", decode,
        None),
    "the block of this tile for the next": (
        "paged_decode", "table[min(start + SIMDGROUPS * TILE + lane", "table[min(start + lane", decode, None),
    "a table read past the context": (
        "paged_decode", "table[min(start + SIMDGROUPS * TILE + lane % TILE, key_end - 1) / BLOCK]",
        "table[(start + SIMDGROUPS * TILE + lane % TILE) / BLOCK]", decode_of_a_full_table, OutOfBounds),
    "one block for two in a tile": (
        "paged_decode", "BLOCK % TILE == 0 ? my_block : simd_shuffle(my_block, ushort(key));", "my_block;",
        decode_of_small_blocks, None),
    "scratch one vector short": (
        "paged_decode", "scratch[SCRATCH]", "scratch[SCRATCH - 1]", wide_decode, OutOfBounds),
    "the same heads in each tile": (
        "paged_decode", "position_in_grid.y) * HEADS;", "position_in_grid.y) / HEAD_TILES * GROUP;",
        lone_decode, DataRace),
    "the last vector not stored": (
        "paged_decode", "i < ROWS_AT_ONCE * VECTORS; i += THREADS", "i < ROWS_AT_ONCE * VECTORS - 1; i += THREADS",
        decode, UninitialisedOutput),
    "a simdgroup barrier after the query heads": (
        "paged_decode", "threadgroup_barrier(mem_flags::mem_threadgroup);\n\nfor (; start",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\n\nfor (; start", decode, DataRace),
    "no barrier between heads that merge": (
        "paged_decode", "  if (first > 0) {", "  if (false) {", wide_decode, DataRace),
    "a shuffle that some lanes skip": (
        "paged_decode", "      for (int distance = COLUMN_LANES",
        "      if (lane < 16) for (int distance = COLUMN_LANES", decode, Divergence),
    "a lane that returns": (
        "paged_decode", "const int key_end", "if (lane == 31) { return; }\nconst int key_end", decode, Divergence),
    "maximum of another head": (
        "paged_decode", "simd_shuffle(best, ushort(row));", "simd_shuffle(best, ushort(0));", sharp_decode, None),
    "a query tile one vector short": (
        "paged_decode", "query_tile[HEADS * DK / 4]", "query_tile[HEADS * DK / 4 - 1]", decode, OutOfBounds),
    "no barrier before the sums are added": (
        "paged_decode", "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  for (int i = me",
        "  for (int i = me", decode, DataRace),
    "simdgroups weigh the same": (
        "paged_decode", "acc[row * VALUE_CHUNKS + c] * factor;", "acc[row * VALUE_CHUNKS + c];", sharp_decode, None),
    "maximum of the last tile alone": (
        "paged_decode", "max(before, simd_max(score));", "simd_max(score);", sharp_decode, None),
    "sums not rescaled": ("paged_decode", "acc[row * VALUE_CHUNKS + c] *= factor;", "", sharp_decode, None),
    "no maximum": ("paged_decode", "max(before, simd_max(score));", "0.0f;", sharp_decode, None),
    "a simdgroup left out": (
        "paged_decode", "s = 0; s < SIMDGROUPS; s++) {\n        sum +=",
        "s = 1; s < SIMDGROUPS; s++) {\n        sum +=", decode, None),
    "softcap left out": ("paged_decode", "if (SOFTCAP) {", "if (false) {", capped_decode, None),
    "scale left out": ("paged_decode", "+ lane] * scale;", "+ lane];", decode, None),
    "sink left out": ("paged_decode", "if (SINKS) {", "if (false) {", capped_decode, None),
    "wrong KV head of the keys": (
        "paged_decode", "* KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DK",
        "* KV_HEADS) * BLOCK + position % BLOCK) * DK", decode, None),
    "wrong KV head of the values": (
        "paged_decode", "* KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DV",
        "* KV_HEADS) * BLOCK + position % BLOCK) * DV", decode, None),
    "another sequence's table": (
        "paged_decode", "block_tables + size_t(item[0]) *", "block_tables + size_t(0) *", decode, None),
    "another token's query": ("paged_decode", "size_t(item[1]) * (KV", "size_t(0) * (KV", decode, None),
    "another KV head of a head": (
        "paged_decode", "position_in_grid.y) / HEAD_TILES", "position_in_grid.y) % KV_HEADS", lone_decode, None),
    "a token by each head": (
        "paged_decode", "position_in_grid.y == 0 &&", "position_in_grid.y < HEAD_TILES &&", lone_decode, DataRace),
    "a chunk of a query beyond its end": (
        "paged_decode", "        if (WHOLE_CHUNKS || (c * LANES + key_lane) * 4 < DK) {\n          const",
        "        if (true) {\n          const", narrow_decode, OutOfBounds),
    "too much threadgroup memory": (
        "paged_decode", "scratch[SCRATCH]", "scratch[SCRATCH * 64]", decode, ResourceLimit),
    "sums not cleared": ("paged_decode", "  acc[i] = float4(0.0f);\n", "", decode, MetalError),
    "a token by every threadgroup": ("paged_decode", TOKEN, "if (me == 0)", decode, DataRace),
    "an implicit bfloat": (
        "paged_decode", "result[e] = static_cast<O>(sum[e]);", "result[e] = sum[e];", bfloat_decode, MetalCompileError),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
