"""The kernel that adds two rows and normalizes the sum computes what MLX computes."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxpaged.models.joins.joined_norms import Addition
from tests.attention.mutants import Mutant, mutant_tests
from tests.metal_on_cpu import DataRace, Divergence, Interpreter, MetalCompileError, UninitialisedOutput
from tests.support import every

UNITS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


def add_and_norm(size: int, dtype: mx.Dtype, rows: int = 3, sharpness: float = 1.0) -> float:
    """The largest difference of a norm in units of rounding of each element: from MLX's, or in float32, where MLX adds
    in another order, from float64. It is inf if the sums differ from MLX's."""
    norm = nn.RMSNorm(size, 1e-5)
    norm.weight = (1 + 0.1 * mx.random.normal((size,), key=mx.random.key(3))).astype(dtype)
    x, y = (sharpness * mx.random.normal((2, rows, 1, size), key=mx.random.key(size))).astype(dtype)
    total, normed = Addition(norm).compute(x, y)
    if not mx.array_equal(total, x + y):
        return math.inf
    expected = np.array(norm(x + y).astype(mx.float32)).astype(np.float64)
    if dtype == mx.float32:
        exact, weight = np.array(total).astype(np.float64), np.array(norm.weight).astype(np.float64)
        expected = weight * exact / np.sqrt(np.square(exact).mean(axis=-1, keepdims=True) + 1e-5)
    difference = np.abs(np.array(normed.astype(mx.float32)) - expected)
    return float((difference / np.maximum(np.abs(expected) * UNITS[dtype], 1e-30)).max())


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("size", every(2, [32, 100, 128, 132, 2048, 2880, 4096, 8192]))
def test_the_kernel_computes_what_mlx_computes(metal: None, size: int, dtype: mx.Dtype) -> None:
    assert add_and_norm(size, dtype) <= 4


def test_rows_that_the_kernel_does_not_take_are_computed_by_mlx(metal_on_cpu: Interpreter) -> None:
    norm = nn.RMSNorm(30)
    x = mx.random.normal((2, 1, 30))
    for a, b, layer in (
        (x, x, norm),
        (x[..., :8], x[:1, :, :8], nn.RMSNorm(8)),
        (x[..., :8], x[..., :8].astype(mx.float16), nn.RMSNorm(8)),
        (x[:0, :, :8], x[:0, :, :8], nn.RMSNorm(8)),
    ):
        total, normed = Addition(layer).compute(a, b)
        assert mx.array_equal(total, a + b)
        assert mx.array_equal(normed, layer(a + b))
    assert metal_on_cpu.launches == []


def test_a_row_is_read_and_written_once(metal_on_cpu: Interpreter) -> None:
    add_and_norm(1024, mx.bfloat16, rows=5)
    launch = metal_on_cpu.last_launch("add_rms_norm")
    assert launch.loads["x"] == launch.loads["y"] == 5 * 1024
    assert launch.threadgroup == (256, 1, 1)
    assert launch.threadgroup_memory == 256 // 32 * 4


def rows_of_bfloat() -> bool:
    return add_and_norm(1000, mx.bfloat16) == 0


def large_rows() -> bool:
    """Several vectors for each thread."""
    return add_and_norm(4096, mx.float16) <= 4


def small_numbers() -> bool:
    return add_and_norm(64, mx.float32, sharpness=1e-3) <= 4


MUTANTS: dict[str, Mutant] = {
    "no barrier before the sums are added": (
        "add_rms_norm", "threadgroup_barrier(mem_flags::mem_threadgroup);\n", "", rows_of_bfloat, DataRace),
    "a barrier of one simdgroup": (
        "add_rms_norm", "threadgroup_barrier", "simdgroup_barrier", rows_of_bfloat, DataRace),
    "a simdgroup left out": ("add_rms_norm", "int s = 0; s <", "int s = 1; s <", rows_of_bfloat, None),
    "a sum of some lanes": (
        "add_rms_norm", "squares = simd_sum(squares);", "if (me < 16) { squares = simd_sum(squares); }",
        rows_of_bfloat, Divergence),
    "squares of an unrounded sum": (
        "add_rms_norm", "sums[i][e] = static_cast<float>(added[e]);",
        "sums[i][e] = static_cast<float>(a[e]) + static_cast<float>(b[e]);", rows_of_bfloat, None),
    "no rounding before the weight": (
        "add_rms_norm", "const T rounded = static_cast<T>(sums[i][e] * factor);",
        "const float rounded = sums[i][e] * factor;", rows_of_bfloat, None),
    "eps left out": ("add_rms_norm", "/ D + eps", "/ D", small_numbers, None),
    "a sum instead of a mean": ("add_rms_norm", "squares / D", "squares", rows_of_bfloat, None),
    "the weight left out": ("add_rms_norm", "static_cast<float>(w[e]) * ", "", rows_of_bfloat, None),
    "another row": ("add_rms_norm", "threadgroup_position_in_grid.y) * D", "0) * D", rows_of_bfloat, DataRace),
    "one vector for each thread": (
        "add_rms_norm", "(VECTORS + THREADS - 1) / THREADS", "VECTORS / VECTORS", large_rows, UninitialisedOutput),
    "a vector left out": (
        "add_rms_norm", "if (vector < VECTORS) {\n    const vec<T, 4> w",
        "if (vector < VECTORS - 1) {\n    const vec<T, 4> w", rows_of_bfloat, UninitialisedOutput),
    "an implicit bfloat": (
        "add_rms_norm", "added[e] = static_cast<T>(", "added[e] = (", rows_of_bfloat, MetalCompileError),
}  # fmt: skip


test_mutant_is_caught, test_without_a_mutant_all_is_well = mutant_tests(MUTANTS)
