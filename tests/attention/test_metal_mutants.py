"""Mutants of our kernels but paged_decode, which has a file of its own (test_decode_mutants.py)."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from tests.attention import scenes
from tests.attention.metal_cases import TOLERANCE, Case
from tests.attention.mutants import Mutant, mutant_tests
from tests.metal_on_cpu import (
    DataRace,
    Divergence,
    MetalCompileError,
    MetalError,
    MetalRunError,
    OutOfBounds,
    ResourceLimit,
    UninitialisedOutput,
)

# What is run, and whether its numbers are right.


def chunks() -> bool:
    """Tiles of ten tokens, three heads and 64 keys, in one work item."""
    case = Case([(2, 300), (12, 33), (2, 2)], head_dim=32, group=3)
    return case.error() <= TOLERANCE[case.dtype]


def sharp_chunks() -> bool:
    return Case([(2, 300), (2, 33)], head_dim=32, sharpness=1000).error() < 1e-3


def split_decode() -> bool:
    case = Case([(1, 150), (1, 33)], head_dim=32, decode_partition=32, has_sinks=True)
    return case.error() <= TOLERANCE[case.dtype]


def many_ranges() -> bool:
    """More than the simdgroups that merge them."""
    case = Case([(1, 150), (1, 33)], head_dim=32, decode_partition=8)
    return case.error() <= TOLERANCE[case.dtype]


def sharp_split_decode() -> bool:
    return Case([(1, 300), (1, 33)], head_dim=32, sharpness=1000, decode_partition=32).error() < 1e-3


def mixed() -> bool:
    """Tiles of 64 keys and 10 queries."""
    case = Case([(2, 33), (13, 140), (5, 5)], head_dim=32, group=3, window=40, softcap=2.0, has_sinks=True)
    return case.error() <= TOLERANCE[case.dtype]


def split_mixed() -> bool:
    """The first query of a tile sees nothing of the tile's last range."""
    case = Case([(2, 33), (13, 140), (5, 5)], head_dim=32, window=20, chunk_partition=4)
    return case.error() <= TOLERANCE[case.dtype]


def chunked() -> bool:
    """A tile with queries of two chunks, and ranges that some of them do not see."""
    case = Case([(13, 70), (1, 40)], head_dim=32, chunk=30, chunk_partition=16)
    return case.error() <= TOLERANCE[case.dtype]


def images() -> bool:
    """Tiles before, in and after an image, in ranges of keys that some of its queries see only because of it."""
    case = Case([(33, 70), (2, 9)], head_dim=32, group=3, window=50, chunk_partition=32, spans={0: [(40, 65)]})
    return case.error() <= TOLERANCE[case.dtype]


def bfloat_chunk() -> bool:
    case = Case([(2, 40)], head_dim=32, dtype=mx.bfloat16)
    return case.error() <= TOLERANCE[case.dtype]


def two_head_tiles() -> bool:
    case = Case([(1, 40)], head_dim=32, group=33)
    return case.error() <= TOLERANCE[case.dtype]


def nan_in_a_later_token() -> bool:
    case = Case([(5, 20)], head_dim=32)
    case.keys[0][-1] = case.values[0][-1] = np.nan
    case.kv.write(case.of_step(case.keys), case.of_step(case.values), case.meta)
    return bool(np.isfinite(case.attend()[:-1]).all())


def nan_in_a_later_range() -> bool:
    case = Case([(5, 20)], head_dim=32, chunk_partition=17)
    case.keys[0][-1] = case.values[0][-1] = np.nan
    case.kv.write(case.of_step(case.keys), case.of_step(case.values), case.meta)
    return bool(np.isfinite(case.attend()[:-1]).all())


def full_blocks() -> bool:
    """Nothing comes after the last sequence's table."""
    case = Case([(2, 32)] * 8, head_dim=32)
    return case.error() <= TOLERANCE[case.dtype]


def long_chunk() -> bool:
    case = Case([(128, 150)], head_dim=32, window=100)
    return case.error() <= TOLERANCE[case.dtype]


def narrow_chunk() -> bool:
    case = Case([(2, 40)], head_dim=40, kv_heads=1, group=16)
    return case.error() <= TOLERANCE[case.dtype]


def wide_split_decode() -> bool:
    case = Case([(1, 40)], head_dim=32, value_size=260, kv_heads=1, group=1, decode_partition=32)
    return case.error() <= TOLERANCE[case.dtype]


def write_layout(layout: KVLayout) -> bool:
    kv = LayerKVCache.from_layout(4, layout, backend="metal")
    keys, values = (mx.random.normal((2, layout.num_kv_heads, size)) for size in (layout.key_size, layout.value_size))
    scenes.write(kv, keys, values, AttentionMetadata.build([2], [2], [[1]], block_size=8))
    expected = [np.zeros((4, *plane.shape), np.float32) for plane in layout.planes]
    for pool, rows in zip(expected, (keys, values), strict=False):
        pool[1, :, :2] = np.array(rows).swapaxes(0, 1)
    return all(np.array_equal(np.array(a), b) for a, b in zip(kv.read_blocks(range(4)), expected, strict=True))


def write_latent() -> bool:
    return write_layout(KVLayout(1, 40, 32, mx.float32, 8, latent=True))


def write_unequal() -> bool:
    return write_layout(KVLayout(2, 40, 32, mx.float32, 8))


def write() -> bool:
    kv = LayerKVCache(4, 2, 32, mx.float32, block_size=8, backend="metal")
    rows = mx.random.normal((8, 2, 32))
    meta = AttentionMetadata.build([8], [12], [[3, 1]], block_size=8)
    object.__setattr__(meta, "padded_slots", mx.where(mx.arange(8) == 2, -1, meta.slot_mapping))
    kv.write(rows, -rows, meta)
    expected = np.zeros((4, 2, 8, 32), np.float32)
    for row in (0, 1, 3, 4, 5, 6, 7):
        expected[3 if row < 4 else 1, :, (row + 4) % 8] = np.array(rows[row])
    keys, values = (np.array(pool).reshape(5, 2, 8, 32)[:4] for pool in kv.arrays[:2])
    return np.array_equal(keys, expected) and np.array_equal(values, -expected)


def moved(layout: KVLayout) -> bool:
    kv = LayerKVCache.from_layout(4, layout, backend="metal")
    planes = [mx.random.normal((2, *plane.shape)).astype(plane.dtype) for plane in layout.planes]
    kv.write_blocks([3, 1], *planes)
    kv.copy_blocks([(3, 0), (1, 2)])
    order = mx.array([1, 0, 1, 0])
    return all(
        mx.array_equal(got, plane[order]) for got, plane in zip(kv.read_blocks([2, 0, 1, 3]), planes, strict=True)
    )


def move() -> bool:
    return moved(KVLayout(2, 32, 48, mx.float16, 8))


def move_latent() -> bool:
    return moved(KVLayout(1, 40, 32, mx.float32, 8, latent=True))


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n\n"
SOFTMAX = "#pragma clang loop unroll(full)\n  for (int i = 0; i < ROWS_EACH; i++)"
AT_KEYS = "((size_t(table[position / BLOCK]) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DK + lane"
AT_VALUES = "((size_t(table[position / BLOCK]) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DV;"
TOKEN = "if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0)"

MUTANTS: dict[str, Mutant] = {
    "no barrier before the softmax": ("paged_attention", BARRIER + SOFTMAX, SOFTMAX, chunks, DataRace),
    "no barrier before the values": (
        "paged_attention", BARRIER + "  if (split", "  if (split", chunks, DataRace),
    "no barrier after the values": (
        "paged_attention", "  threadgroup_barrier(mem_flags::mem_threadgroup);  // the weights have been read\n", "",
        chunks, DataRace),
    "no barrier after the query tile": (
        "paged_attention", "threadgroup_barrier(mem_flags::mem_threadgroup);\n\nfor (int start", "for (int start",
        chunks, DataRace),
    "no barrier before the splits are summed": (
        "paged_attention", "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  for (int i = me; i < ROWS", 
        "  for (int i = me; i < ROWS", chunks, DataRace),
    "no barrier between rows of the splits": (
        "paged_attention", "  if (first > 0) {", "  if (false) {", chunks, DataRace),
    "a fence for the wrong memory": (
        "paged_attention", BARRIER + SOFTMAX, BARRIER.replace("mem_threadgroup", "mem_device") + SOFTMAX,
        chunks, DataRace),
    "a simdgroup barrier for a threadgroup one": (
        "paged_attention", BARRIER + SOFTMAX, BARRIER.replace("threadgroup_b", "simdgroup_b") + SOFTMAX,
        chunks, DataRace),
    "a shuffle that some lanes skip": (
        "paged_attention", "for (int distance", "if (key < count) for (int distance", chunks, Divergence),
    "a reduction that some lanes skip": (
        "paged_attention", "best = simd_max(best);", "if (lane < count) { best = simd_max(best); }",
        chunks, Divergence),
    "a lane that returns": (
        "paged_attention", "const int key_end", "if (lane == 31) { return; }\nconst int key_end", chunks, Divergence),
    "a thread without a column that returns": (
        "paged_attention", "const int key_end", "if (me / COLUMNS >= 2) { return; }\nconst int key_end",
        chunks, Divergence),
    "one key too many": ("paged_attention", "min(TILE, key_end - start);", "min(TILE, key_end + 1 - start);",
                         full_blocks, OutOfBounds),
    "sees the future": ("paged_attention", "position <= last_visible && ", "", mixed, None),
    "an image is causal": ("paged_attention", "MUTUAL ? max(here, item[7]) : here", "here", images, None),
    "text sees no more than an image": (
        "paged_attention", "max(here, item[7])", "item[7]", images, None),
    "a query of an image sees its tile's keys": (
        "paged_attention", "max(here, item[7])", "key_end - 1", images, None),
    "a window one too wide": ("paged_attention", "here - window + 1;", "here - window;", mixed, None),
    "a window for a chunk": ("paged_attention", "CHUNKED ? here / window * window :", "false ? 0 :", chunked, None),
    "a masked score has weight": (
        "paged_attention", "weights[t] == MASKED ? 0.0f : ", "", nan_in_a_later_range, None),
    "a masked value is multiplied by zero": (
        "paged_attention", "if (weight != 0.0f) {", "if (true) {", nan_in_a_later_token, None),
    "no rescaling": ("paged_attention", "acc[row * VEC + e] *= factor;", "", chunks, None),
    "sum not rescaled": ("paged_attention", "sums[i] = sums[i] * factor +", "sums[i] = sums[i] +", sharp_chunks, None),
    "no maximum": ("paged_attention", "best = simd_max(best);", "best = 0.0f;", sharp_chunks, None),
    "maximum of the last tile alone": (
        "paged_attention", "float best = maxima[i];", "float best = MASKED;", sharp_chunks, None),
    "softcap left out": ("paged_attention", "if (SOFTCAP) {", "if (false) {", mixed, None),
    "softcap on one side": ("paged_attention", "tanh(weights[t] / softcap)", "tanh(weights[t])", mixed, None),
    "scale left out": ("paged_attention", "+ key] * scale;", "+ key];", mixed, None),
    "sink left out": ("paged_attention", "if (SINKS) {", "if (false) {", mixed, None),
    "wrong KV head of the keys": ("paged_attention", AT_KEYS, AT_KEYS.replace(" + kv_head", ""), chunks, None),
    "wrong KV head of the values": ("paged_attention", AT_VALUES, AT_VALUES.replace(" + kv_head", ""), chunks, None),
    "a chunk of a query beyond its end": (
        "paged_attention", "WHOLE_CHUNKS || column", "true || column", narrow_chunk, MetalError),
    "the next slot": (
        "paged_attention", AT_VALUES, AT_VALUES.replace("position %", "(position + 1) %"), chunks, None),
    "the next block": (
        "paged_attention", AT_KEYS, AT_KEYS.replace("/ BLOCK]", "/ BLOCK + 1]"), chunks, MetalRunError),
    "another sequence's table": (
        "paged_attention", "block_tables + size_t(item[0]) *", "block_tables + size_t(0) *", chunks, None),
    "a query tile one element short": (
        "paged_attention", "query_tile[ROWS * DK / 4]", "query_tile[ROWS * DK / 4 - 1]", chunks, OutOfBounds),
    "scratch for one split less": ("paged_attention", "scores[SCRATCH]", "scores[SCRATCH - DV]", chunks, OutOfBounds),
    "too much threadgroup memory": (
        "paged_attention", "scores[SCRATCH]", "scores[SCRATCH * 16]", chunks, ResourceLimit),
    "sums not cleared": ("paged_attention", "  acc[i] = 0.0f;\n", "", chunks, MetalError),
    "a split left out": ("paged_attention", "for (int s = 0; s < SPLITS", "for (int s = 1; s < SPLITS", chunks, None),
    "the last column not stored": (
        "paged_attention", "i < ROWS_AT_ONCE * DV; i += THREADS", "i < ROWS_AT_ONCE * DV - 1; i += THREADS",
        chunks, UninitialisedOutput),
    "a head beyond the group": (
        "paged_attention", "&& in_group < GROUP) {\n      const int d", ") {\n      const int d",
        two_head_tiles, MetalRunError),
    "a token by every threadgroup": ("paged_attention", TOKEN, "if (me == 0)", chunks, DataRace),
    "a pointer without address space": (
        "paged_attention", "const device int* item", "const int* item", chunks, MetalCompileError),
    "a pointer into the wrong address space": (
        "paged_attention", "const device int* item", "const threadgroup int* item", chunks, MetalCompileError),
    "an implicit bfloat": (
        "paged_attention", "static_cast<O>(sum / denominator)", "(sum / denominator)", bfloat_chunk,
        MetalCompileError),
    "a range left out": (
        "merge_partials", "for (int i = split; i < count", "for (int i = split + 1; i < count", split_decode, None),
    "a split left out of the sum": (
        "merge_partials", "s = 0; s < SPLITS; s++) {\n    const", "s = 1; s < SPLITS; s++) {\n    const",
        split_decode, None),
    "no barrier before the splits meet": (
        "merge_partials", "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", split_decode, DataRace),
    "no maximum over ranges": (
        "merge_partials", "max(best, row[D]);", "min(best, row[D]);", sharp_split_decode, None),
    "no maximum over splits": (
        "merge_partials", "best = max(best, split_max[s]);", "best = split_max[0];", sharp_split_decode, None),
    "ranges weigh the same": (
        "merge_partials", "values[e] * factor;", "values[e];", many_ranges, None),
    "an earlier range not rescaled": (
        "merge_partials", "acc[c * 4 + e] * before +", "acc[c * 4 + e] +", many_ranges, None),
    "the sum of an earlier range not rescaled": (
        "merge_partials", "denominator = denominator * before +", "denominator = denominator +", many_ranges, None),
    "columns after the threads left out": (
        "merge_partials", "column += THREADS", "column += D", wide_split_decode, UninitialisedOutput),
    "no sink after merging": ("merge_partials", "if (SINKS) {", "if (false) {", split_decode, None),
    "a column too few": ("merge_partials", "column = me; column < D;", "column = me; column < D - 1;", split_decode,
                         UninitialisedOutput),
    "wrong rows merged": ("merge_partials", "size_t(range[1]) *", "size_t(1) *", split_mixed, None),
    "skipped slot not skipped": ("kv_write", "if (slot >= 0)", "if (true)", write, OutOfBounds),
    "two rows in one slot": ("kv_write", "BLOCK + slot % BLOCK;", "BLOCK;", write, DataRace),
    "slot for block": ("kv_write", "size_t(slot / BLOCK)", "size_t(slot)", write, OutOfBounds),
    "no token": ("kv_write", "  done[0] = 1;\n", "", write, UninitialisedOutput),
    "const not cast away": (
        "kv_write", "(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to",
        "(const device vec<T, 4>*)(key_pool + to", write, MetalCompileError),
    "values for keys": ("kv_write", "(new_keys + from", "(new_values + from", write, None),
    "values written for a latent": ("kv_write", "if (column < DV)", "if (column < DK)", write_latent, MetalError),
    "k_pe at the start of its row": ("kv_write", "* VALUE_PITCH + VALUE_START", "* VALUE_PITCH", write_latent, None),
    "keys of the values' size": ("kv_write", "if (column < DK)", "if (column < DV)", write_unequal, None),
    "values of the keys' size": ("kv_write", "if (column < DV)", "if (true)", write_unequal, MetalError),
    "first block for all": ("kv_gather", "blocks[key / BLOCK]", "blocks[0]", long_chunk, None),
    "gathered heads side by side": (
        "kv_gather", "kv_head * threads_per_grid.y + key", "kv_head + key", long_chunk, DataRace),
    "moved the other way": (
        "block_move", "moves[move * 2]);\nconst size_t to = size_t(moves[move * 2 + 1]);",
        "moves[move * 2 + 1]);\nconst size_t to = size_t(moves[move * 2]);", move, MetalError),
    "blocks in order": ("block_move", "size_t(moves[move * 2])", "size_t(move)", move, None),
    "half a block moved": ("block_move", "if (word < A) {", "if (word < A / 2) {", move, UninitialisedOutput),
    "blocks side by side": ("block_move", "target[to * B + word]", "target[to * (B / 2) + word]", move, DataRace),
    "the first plane's size for both": ("block_move", "if (word < B) {", "if (word < A) {", move, UninitialisedOutput),
    "a second plane of a latent": ("block_move", "if (word < B) {", "if (word < A) {", move_latent, MetalError),
    "the first plane for both": ("block_move", "Word*)source_b)", "Word*)source_a)", move, MetalError),
    "no zero for the plane that is not there": (
        "block_move", "INTO_POOL || B == 0", "INTO_POOL", move_latent, UninitialisedOutput),
    "no token of a move": ("block_move", "  done[0] = 1;\n", "", move, UninitialisedOutput),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
