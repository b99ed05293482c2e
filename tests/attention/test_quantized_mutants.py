"""Mutants of the parts of kernels that are for quantized pools."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import Qkv, QkvKind, QkvShape
from mlxpaged.attention.quantization import Quantization, quantization_of
from mlxpaged.attention.self_check import QUANTUM, fused_steps
from mlxpaged.attention.tuning import CONTIGUOUS, MATRIX, Tuning
from tests.attention.metal_cases import TOLERANCE, Case
from tests.attention.mutants import Mutant, mutant_tests
from tests.metal_on_cpu import (
    DataRace,
    Divergence,
    MetalError,
    OutOfBounds,
    UninitialisedOutput,
)

WIDE: dict[str, Any] = {"head_dim": 128, "quantization": quantization_of("int4", 128, 128)}
NARROW: dict[str, Any] = {"head_dim": 96, "quantization": quantization_of("int4", 96, 96)}
"""Groups of one element for each lane."""


def is_right(case: Case) -> bool:
    return case.error() <= TOLERANCE[case.dtype]


def decode() -> bool:
    return is_right(Case([(1, 70), (1, 33)], **WIDE))


def narrow_decode() -> bool:
    return is_right(Case([(1, 40)], **NARROW))


def chunk() -> bool:
    """Tiles of 32 rows: a thread has two columns."""
    return is_right(Case([(16, 70), (2, 33)], **WIDE))


def copied() -> bool:
    return is_right(Case([(3, 70)], tuning=Tuning(chunks=CONTIGUOUS), **WIDE))


def matrix() -> bool:
    return is_right(Case([(16, 70), (2, 33)], tuning=Tuning(chunks=MATRIX), **WIDE))


def written(kind: Quantization, size: int) -> bool:
    """Rows of both signs, of one sign and of one number, and a token that is not written."""
    layout = KVLayout(2, size, size, mx.float32, 8, quantization=kind)
    rows = mx.random.normal((9, 2, size), key=mx.random.key(0))
    rows[1], rows[3], rows[4], rows[5] = 0.0, mx.abs(rows[3]) + 10, -mx.abs(rows[4]) - 10, 7.0
    caches = [LayerKVCache.from_layout(4, layout, backend) for backend in ("metal", "gather")]
    for kv in caches:
        meta = AttentionMetadata.build([9], [12], [[3, 1]], block_size=8)
        if kv is caches[0]:
            object.__setattr__(meta, "padded_slots", mx.where(mx.arange(9) == 2, -1, meta.slot_mapping))
            kv.write(rows, 2 * rows, meta)
        else:
            kv.write(rows, 2 * rows, meta)
            planes = kv.read_blocks([3])
            for plane in planes:
                plane[0, :, 5] = 0
            kv.write_blocks([3], *planes)
    read = [kv.read_blocks([3, 1]) for kv in caches]
    return all(mx.array_equal(got.view(mx.uint8), expected.view(mx.uint8)) for got, expected in zip(*read, strict=True))


def write_bytes() -> bool:
    return written(Quantization(8, 64, 8, 32), 64)


def write_nibbles() -> bool:
    return written(Quantization(8, 128, 4, 64), 128) and written(Quantization(8, 32, 4, 32), 96)


def fused() -> bool:
    """Twelve heads, in two threadgroups."""
    layout = KVLayout(2, 64, 64, mx.float32, 16, quantization=Quantization(8, 64, 4, 32))
    shape = QkvShape(layout, QkvKind(8, 64, norms=True))
    results = zip(fused_steps(shape, "metal"), fused_steps(shape, "gather"), strict=True)
    return all(float(mx.abs(got - expected).max()) < QUANTUM for got, expected in results)


def unwritten() -> bool:
    layout = KVLayout(1, 64, 64, mx.float32, 8, quantization=Quantization(8, 64, 8, 64))
    kv = LayerKVCache.from_layout(2, layout, "metal")
    meta = AttentionMetadata.build([2], [2], [[1]], block_size=8)
    object.__setattr__(meta, "padded_slots", mx.full((8,), -1, mx.int32))
    kv.write_rows(mx.ones((2, 3 * 64)), Qkv(1, None, None), meta)
    return not any(bool(array.any()) for array in kv.read_blocks([0, 1]))


MUTANTS: dict[str, Mutant] = {
    "keys that are quantized before they are complete": (
        "qkv_write", "  simdgroup_barrier(mem_flags::mem_threadgroup);\n", "", fused, DataRace),
    "a barrier that some simdgroups skip": (
        "qkv_write", "  simdgroup_barrier(mem_flags::mem_threadgroup);\n",
        "  if (is_key) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n", fused, Divergence),
    "one key for all simdgroups": (
        "qkv_write", "key_rows + int(thread_position_in_threadgroup.y) * DK", "key_rows", fused, DataRace),
    "room for one key": ("qkv_write", "key_rows[ROWS * DK]", "key_rows[DK]", fused, OutOfBounds),
    "a fused key that is not written": ("qkv_write", "is_key && slot >= 0)", "is_key)", unwritten, MetalError),
    "the scales of a fused value for those of its key": (
        "qkv_write", "row * SCALES + KEY_SCALES, lane", "row * SCALES, lane", fused, DataRace),
    "keys in place of queries": (
        "qkv_write", "    if (is_key) {\n      key_row", "    if (is_query) {\n      key_row", fused, MetalError),
    "halves of a key exchanged": (
        "qkv_write", "key_row[at] = static_cast<T>(x);", "key_row[at] = static_cast<T>(y);", fused, None),
    "the scale of the first group": (
        "paged_decode", "at / DK, c * LANES * 4, key_lane", "at / DK, 0, key_lane", narrow_decode, None),
    "scales of the first row for keys": ("paged_decode", "scales + at / DK * SCALES", "scales", decode, None),
    "scales of the key for its value": (
        "paged_decode", "at / DV * SCALES + KEY_SCALES", "at / DV * SCALES", decode, None),
    "groups that are longer than what the lanes share": (
        "paged_decode", "DV, 4, COLUMN_LANES * 4>", "DV, 4, 32>", decode, None),
    "the same columns of a key in each chunk": (
        "paged_attention", "at / DK, c * LANES * 4, lane", "at / DK, 0, lane", chunk, None),
    "the same columns of a value for each thread": (
        "paged_attention", "at / DV, 0, column", "at / DV, 0, 0", chunk, None),
    "scales of the next key": (
        "paged_attention", "scales + at / DK * SCALES", "scales + (at / DK + 1) * SCALES", chunk, MetalError),
    "the last column of a thread left out": (
        "paged_attention", "e < VEC; e++) {\n        v[e] = part[e];", "e < VEC - 1; e++) {\n        v[e] = part[e];",
        chunk, MetalError),
    "the bits of a value for those of a key": (
        "matrix_attention", "dequantized<VALUE_BITS", "dequantized<KEY_BITS", matrix, MetalError),
    "the same columns in each pair": (
        "matrix_attention", "at / DK, pair * 16, matrix_column", "at / DK, 0, matrix_column", matrix, None),
    "a slot outside the range": (
        "matrix_attention", "float4 part = float4(0.0f);\n        if (has_value && ",
        "float4 part = float4(0.0f);\n        if (", matrix, MetalError),
    "the values' scales for copied keys": (
        "kv_gather", "(key_pool, of_row, from", "(key_pool, of_row + KEY_SCALES, from", copied, None),
    "three of four elements copied": (
        "kv_gather", "e < 4; e++) {\n    keys", "e < 3; e++) {\n    keys", copied, UninitialisedOutput),
    "a skipped slot": ("kv_quantize", "if (slot >= 0)", "if (true)", write_bytes, OutOfBounds),
    "values with the scales of keys": ("kv_quantize", "of_row + KEY_SCALES", "of_row", write_bytes, None),
    "values in rows of the keys' size": (
        "kv_quantize", "row * DV * VALUE_BITS / 32", "row * DV * KEY_BITS / 32", write_nibbles, MetalError),
    "no token": ("kv_quantize", "  done[0] = 1;\n", "", write_bytes, UninitialisedOutput),
    "no bias": ("quantization.h", " + bias;", ";", decode, None),
    "scales for biases": (
        "quantization.h", "<float>(scales[SIZE / GROUP + group])", "<float>(scales[group])", decode, None),
    "one nibble for all": ("quantization.h", "(word >> (BITS * e))", "(word >> BITS)", decode, None),
    "the neighbour's bits": ("quantization.h", "((1 << BITS) - 1)", "255u", decode, None),
    "half of the bytes of a word": ("quantization.h", "BITS * N == 32", "BITS * N == 64", decode, None),
    "the lane's own minimum": ("quantization.h", "least = simd_min(least);", "", write_bytes, None),
    "a maximum that half of the lanes share": (
        "quantization.h", "greatest = simd_max(greatest);", "if (lane < 16) { greatest = simd_max(greatest); }",
        write_bytes, Divergence),
    "the smaller end is exact": (
        "quantization.h", "is_negative ? least : greatest", "is_negative ? greatest : least", write_bytes, None),
    "steps of the other sign": (
        "quantization.h", "is_negative ? scale : -scale", "is_negative ? -scale : scale", write_bytes, None),
    "zero is not exact": ("quantization.h", "scale = edge / steps_to_zero;", "", write_bytes, None),
    "no least step": ("quantization.h", "/ STEPS, 1e-7f)", "/ STEPS, 0.0f)", write_bytes, None),
    "steps that are cut off": ("quantization.h", "metal::rint((x[e]", "metal::floor((x[e]", write_bytes, None),
    "elements of a lane in reverse": (
        "quantization.h", "<< (BITS * e);", "<< (BITS * (EACH - 1 - e));", write_nibbles, None),
    "lanes of a word in reverse": (
        "quantization.h", "lane / distance % 2 == 0", "lane / distance % 2 == 1", write_nibbles, None),
    "a word of the next lane": ("quantization.h", "lane % LANES == 0", "lane % LANES == 1", write_nibbles, None),
    "biases in place of scales": (
        "quantization.h", "scales[group] = static_cast<T>(scale);", "scales[group] = static_cast<T>(bias);",
        write_bytes, None),
}  # fmt: skip

test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
