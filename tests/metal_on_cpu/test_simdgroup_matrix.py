"""8x8 simdgroup matrices give the numbers of a matrix product, and what Metal leaves undefined is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from . import (
    DataRace,
    Divergence,
    Interpreter,
    MetalCompileError,
    MetalError,
    MetalRunError,
    Misaligned,
    OutOfBounds,
    UninitialisedOutput,
    UninitialisedRead,
)
from .test_language import FLOATS, run, values

pytestmark = pytest.mark.usefixtures("metal_on_cpu")

A, B = values(8, 8), values(8, 8, seed=1)
LOADED = """
    simdgroup_float8x8 x, y, z;
    simdgroup_load(x, a, 8);
    simdgroup_load(y, b, 8);
"""
STORED = "simdgroup_store(z, out, 8);"


def product(source: str, shape: tuple[int, ...] = (8, 8), **more: Any) -> mx.array:
    return run(source, {"a": A, "b": B}, shape, grid=(32, 1, 1), **more)


def close(a: mx.array, b: mx.array) -> bool:
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), atol=1e-5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products_accumulate_in_float(dtype: mx.Dtype) -> None:
    a, b = values(16, 24, dtype=dtype), values(24, 8, dtype=dtype, seed=1)
    source = """
        uint row = threadgroup_position_in_grid.y * 8;
        threadgroup float result[64];
        simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_matrix<T, 8, 8> left, right;
        for (int k = 0; k < 24; k += 8) {
          simdgroup_load(left, a + row * 24 + k, 24);
          simdgroup_load(right, b + k * 8, 8);
          simdgroup_multiply_accumulate(c, left, right, c);
        }
        c.thread_elements()[0] *= 2.0f;
        c.thread_elements()[1] *= 2.0f;
        simdgroup_store(c, result, 8);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = thread_index_in_simdgroup; i < 64; i += 32) {
          out[row * 8 + i] = result[i];
        }
    """
    out = run(source, {"a": a, "b": b}, (16, 8), grid=(32, 2, 1), template=[("T", dtype)])
    assert close(out, 2 * (a.astype(mx.float32) @ b.astype(mx.float32)))


def test_a_product_alone_and_a_diagonal() -> None:
    source = (
        LOADED + "simdgroup_float8x8 two(2.0f); simdgroup_multiply(z, x, two); simdgroup_multiply(z, z, y);" + STORED
    )
    assert close(product(source), 2 * A @ B)


def test_a_lane_holds_two_neighbours_where_mlx_looks_for_them() -> None:
    """The rows and columns of ml-explore/mlx, steel/attn/mma.h."""
    source = """
        const int lane = thread_index_in_simdgroup;
        simdgroup_float8x8 z;
        z.thread_elements()[0] = lane;
        z.thread_elements()[1] = lane + 100;
    """
    expected = np.zeros((8, 8), np.float32)
    for lane in range(32):
        row, column = (lane // 4 & 4) + lane // 2 % 4, (lane // 4 & 2) * 2 + lane % 2 * 2
        expected[row, column : column + 2] = lane, lane + 100
    assert np.array_equal(np.array(product(source + STORED)), expected)


def test_loads_and_stores_transpose_and_start_at_an_origin() -> None:
    a = values(16, 24)
    source = """
        simdgroup_float8x8 m;
        simdgroup_load(m, a, 24, ulong2(16, 8), true);
        simdgroup_store(m, out, 16, ulong2(8, 0));
        simdgroup_load(m, a, 24, ulong2(0, 8));
        simdgroup_store(m, out, 16, ulong2(0, 0), true);
    """
    out = run(source, {"a": a}, (8, 16), grid=(32, 1, 1))
    assert mx.array_equal(out, mx.concatenate([a[8:, :8].T, a[8:, 16:].T], axis=1))


def test_a_load_counts_each_element_once(metal_on_cpu: Interpreter) -> None:
    product(LOADED + "simdgroup_multiply_accumulate(z, x, y, x);" + STORED)
    launch = metal_on_cpu.last_launch("test")
    assert launch.loads["a"] == launch.loads["b"] == launch.stores["out"] == 64
    assert launch.simd_operations == 4, "two loads, a product, a store"


@pytest.mark.parametrize(
    ("error", "source", "match"),
    [
        (Divergence, "if (lane < 31) { simdgroup_multiply(z, x, y); }", "simdgroup_multiply"),
        (Divergence, "if (lane < 31) { simdgroup_load(z, a, 8); }", "simdgroup_load"),
        (
            Divergence,
            "if (lane < 16) { simdgroup_multiply(z, x, y); } else { simdgroup_multiply(z, y, x); }",
            "another lane",
        ),
        (OutOfBounds, "simdgroup_load(z, a + 8, 8);", r"a\["),
        (OutOfBounds, "simdgroup_load(z, a, 9);", r"a\["),
        (OutOfBounds, "simdgroup_load(z, a, 8, ulong2(1, 0));", r"a\["),
        (OutOfBounds, "simdgroup_store(x, out + 1, 8);", r"out\["),
        (OutOfBounds, "threadgroup float t[63]; simdgroup_store(x, t, 8);", "threadgroup array"),
        (UninitialisedRead, "threadgroup float t[64]; simdgroup_load(z, t, 8);", "never stored to"),
        (DataRace, "threadgroup float t[64]; simdgroup_store(x, t, 8); simdgroup_load(z, t, 8, ulong2(0), true);", "t"),
        (Misaligned, "simdgroup_load(z, (const device float*)((const device half*)a + 1), 8);", r"a\["),
        (UninitialisedRead, "", "out"),
        (MetalRunError, "simdgroup_multiply_accumulate(z, x, y, z);", "out"),
    ],
    ids=str,
)
def test_a_run_that_metal_does_not_define_stops(error: type[MetalError], source: str, match: str) -> None:
    with pytest.raises(error, match=match):
        product("const int lane = thread_index_in_simdgroup;" + LOADED + source + STORED)


def test_a_simdgroup_that_is_not_whole_has_no_matrices() -> None:
    with pytest.raises(Divergence, match="in a simdgroup of 6 lanes"):
        run(
            "simdgroup_float8x8 m = simdgroup_float8x8(1.0f); simdgroup_multiply(m, m, m); out[0] = 0;",
            {},
            (1,),
            grid=(6, 1, 1),
        )


def test_elements_that_no_lane_stored_are_found() -> None:
    with pytest.raises(UninitialisedOutput):
        product(LOADED + "z = x;" + STORED, shape=(8, 9))


@pytest.mark.parametrize(
    "source",
    [
        "simdgroup_matrix<int, 8, 8> m;",
        "simdgroup_matrix<float, 4, 4> m;",
        "simdgroup_float8x8 m; simdgroup_load(m, (const device half*)a, 8);",
        "simdgroup_float8x8 m; float t[64]; simdgroup_load(m, t, 8);",
        "simdgroup_float8x8 m; const constant float* c; simdgroup_load(m, c, 8);",
        "simdgroup_float8x8 m; simdgroup_store(m, a, 8);",
        "simdgroup_float8x8 m = simdgroup_float8x8(1.0f); m = m * m;",
        "simdgroup_float8x8 m = simdgroup_float8x8(1.0f); out[0] = m[0][0];",
        "simdgroup_half8x8 h = simdgroup_half8x8(1.0h); simdgroup_float8x8 m = simdgroup_float8x8(h);",
        "simdgroup_float8x8 m(1.0f); simdgroup_half8x8 h(1.0h); simdgroup_multiply_accumulate(m, m, h, m);",
        "simdgroup_float8x8 m(1.0f); simdgroup_half8x8 h(1.0h); simdgroup_multiply_accumulate(m, h, h, h);",
        "simdgroup_float8x8 m(1.0f); simdgroup_half8x8 h(1.0h); simdgroup_multiply(h, m, m);",
    ],
)
def test_what_metal_does_not_have_does_not_compile(source: str) -> None:
    with pytest.raises(MetalCompileError):
        product(source + "out[0] = 0;", shape=(1,))
