"""What Metal rejects or leaves undefined is an error here, of the right class, at the right place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from . import (
    ArithmeticFault,
    DataRace,
    Divergence,
    Interpreter,
    MetalCompileError,
    MetalError,
    MetalRunError,
    Misaligned,
    OutOfBounds,
    ResourceLimit,
    Runaway,
    UninitialisedOutput,
    UninitialisedRead,
)
from .test_language import run, values

pytestmark = pytest.mark.usefixtures("metal_on_cpu")

I = "const uint i = thread_position_in_grid.x;\n"  # noqa: E741
LOCAL = "const uint i = thread_index_in_threadgroup;\n"
X = values(64)


def fails(
    error: type[MetalError],
    source: str,
    *,
    match: str = "test",
    size: int = 64,
    group: int = 64,
    header: str = "",
    dtype: mx.Dtype = mx.float32,
    inputs: Mapping[str, mx.array | float] | None = None,
    **more: object,
) -> MetalError:
    given = {"inp": X} if inputs is None else inputs
    with pytest.raises(error, match=match) as caught:
        run(source, given, (size,), dtype, threadgroup=(group, 1, 1), header=header, **more)  # type: ignore[arg-type]
    assert "test" in str(caught.value)
    return caught.value


# ---- bounds ----


@pytest.mark.parametrize(
    ("source", "buffer", "index"),
    [
        ("out[i] = inp[i + 1];", "inp", 64),
        ("out[i] = inp[int(i) - 1];", "inp", -1),
        ("out[i + 1] = inp[i];", "out", 64),
        ("out[i] = inp[i == 7 ? 1 << 30 : 0];", "inp", 1 << 30),
        ("out[i] = inp[i == 7 ? -(1 << 30) : 0];", "inp", -(1 << 30)),
        ("out[i] = float4(*(const device float4*)(inp + i / 4 * 4 + (i == 63 ? 4 : 0))).x;", "inp", 64),
        ("out[i] = small[i];", "small", 3),
        ("out[i] = inp[0] + inp_shape[i];", "inp_shape", 1),
    ],
)
def test_out_of_bounds(source: str, buffer: str, index: int) -> None:
    # Which thread comes first is the seed's choice; one thread past the end is enough to be caught.
    error = fails(OutOfBounds, I + source, inputs={"inp": X, "small": values(3)}, match="outside the buffer")
    assert isinstance(error, MetalRunError)
    assert error.buffer == buffer
    assert error.index == index or buffer in ("small", "inp_shape")
    assert error.thread is not None
    assert error.threadgroup == (0, 0, 0)


def test_wild_address() -> None:
    fails(OutOfBounds, I + "out[i] = inp[size_t(i + 1) << 50];", match="which is in no buffer")


def test_past_a_threadgroup_array() -> None:
    source = (
        LOCAL
        + """
        threadgroup float a[64], b[64];
        a[i] = 1; b[i] = 2;
        threadgroup float* p = a;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = p[i + 1];
    """
    )
    assert fails(OutOfBounds, source, match="threadgroup array").buffer == "a"  # type: ignore[attr-defined]


def test_past_a_local_array() -> None:
    fails(OutOfBounds, I + "float a[4] = {1, 2, 3, 4}; out[i] = a[i / 15];", match="past the end of an array")


def test_half_of_a_vector_outside() -> None:
    source = I + "if (i == 0) { *(device packed_float4*)(out + 60) = packed_float4(1); }"
    fails(OutOfBounds, source, size=63, init_value=0, match=r"out\[60\]: store of 16 bytes")


def test_misaligned_vector() -> None:
    fails(Misaligned, I + "out[i] = (*(const device float4*)(inp + (i % 2))).x;", match=r"inp\[1\]")


def test_misaligned_slice() -> None:
    """A row slice of an odd length starts where its elements are aligned and its vectors are not."""
    x = values(66).reshape(6, 11)[2:]
    mx.eval(x)
    source = I + "out[i] = (*(const device float4*)inp).x;"
    fails(Misaligned, source, inputs={"inp": x}, match=r"inp\[0\]")
    assert run(I + "out[i] = inp[i];", {"inp": x}, (44,)).tolist() == x.reshape(-1).tolist()
    run(source, {"inp": values(64).reshape(8, 8)[2:]}, (1,))
    run(source, {"inp": values(64).reshape(8, 8)[2:, 1:]}, (1,))


def test_wrong_byte_count_of_a_strided_view_is_seen() -> None:
    x = mx.transpose(values(8, 8)[:, :4])
    mx.eval(x)
    fails(OutOfBounds, I + "out[i] = inp[i * 8 + 4];", inputs={"inp": x}, ensure_row_contiguous=False)


# ---- races ----

RACES = {
    "threadgroup memory without a barrier": """
        threadgroup float a[64];
        a[i] = i;
        out[i] = a[63 - i];
    """,
    "barrier that orders the other memory": """
        threadgroup float a[64];
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_device);
        out[i] = a[63 - i];
    """,
    "barrier that orders nothing": """
        threadgroup float a[64];
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_none);
        out[i] = a[63 - i];
    """,
    "simdgroup barrier across simdgroups": """
        threadgroup float a[64];
        a[i] = i;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[63 - i];
    """,
    "lanes of one simdgroup": """
        threadgroup float a[64];
        a[i] = i;
        out[i] = a[i ^ 1];
    """,
    "read, then overwritten without a barrier": """
        threadgroup float a[64];
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[63 - i];
        a[i] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    """,
    "all store the same value": """
        threadgroup float a;
        a = 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a;
    """,
    "device memory in a threadgroup": """
        out[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = out[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = x;
    """,
    "atomic and plain": """
        threadgroup atomic_uint a;
        if (i == 0) { atomic_store_explicit(&a, 0u, memory_order_relaxed); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&a, 1u, memory_order_relaxed);
        out[i] = *(threadgroup uint*)&a;
    """,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RACES)
def test_data_race(metal_on_cpu: Interpreter, name: str, seed: int) -> None:
    metal_on_cpu.seeds = (seed,)
    fails(DataRace, LOCAL + RACES[name], match="not ordered")


@pytest.mark.parametrize("group", [1, 32])
def test_race_across_threadgroups(group: int) -> None:
    fails(DataRace, I + "out[i / 2 * 2] = i; if (i % 2) { out[i] = i; }", group=group, match=r"out\[\d+\]")
    fails(DataRace, I + "out[i] = i; out[i] += out[(i + 32) % 64];", group=group)
    fails(DataRace, I + "const_cast<device float*>(inp)[0] = i; out[i] = 1;", group=group)


def test_input_read_by_one_threadgroup_and_stored_by_another() -> None:
    fails(DataRace, I + "out[i] = inp[63 - i]; const_cast<device float*>(inp)[i] = 2;", group=32, match="inp")


def test_ordered_accesses_are_no_race() -> None:
    source = (
        LOCAL
        + """
        threadgroup float a[64];
        a[i] = i;
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float x = a[i ^ 1];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        a[i ^ 32] = x;
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
        out[i] = a[63 - i];
    """
    )
    assert set(np.array(run(source, {}, (64,), threadgroup=(64, 1, 1)))) == set(range(64))


# ---- divergence ----

DIVERGENCES = {
    "simd_sum in a branch": "if (i % 2) { out[i] = simd_sum(1.0f); } else { out[i] = 0; }",
    "simd_sum in both branches": "if (i % 2) { out[i] = simd_sum(1.0f); } else { out[i] = simd_sum(2.0f); }",
    "both branches on one line": "out[i] = i % 2 ? simd_sum(1.0f) : simd_sum(2.0f);",
    "a helper called in both branches": "if (i % 2) { out[i] = helper(1); } else { out[i] = helper(1); }",
    "simd_sum in a loop of uneven length": (
        "out[i] = 0; for (uint k = 0; k < i % 3; k++) { out[i] += simd_sum(1.0f); }"
    ),
    "simd_sum after an early return": "out[i] = 0; if (i == 3) { return; } out[i] = simd_sum(1.0f);",
    "barrier in a branch": "out[i] = 0; if (i < 32) { threadgroup_barrier(mem_flags::mem_threadgroup); }",
    "barrier after an early return": ("out[i] = 0; if (i > 60) { return; } threadgroup_barrier(mem_flags::mem_none);"),
    "two barriers": (
        "out[i] = 0; if (i < 32) { threadgroup_barrier(mem_flags::mem_none); } "
        "else { threadgroup_barrier(mem_flags::mem_none); }"
    ),
    "barrier in a loop of uneven length": (
        "out[i] = 0; for (uint k = 0; k < 1 + i / 32; k++) { threadgroup_barrier(mem_flags::mem_none); }"
    ),
    "barrier against simd operation": (
        "out[i] = 0; if (i < 16) { simd_sum(1.0f); } else { threadgroup_barrier(mem_flags::mem_none); }"
    ),
    "simdgroup barrier in a branch": "out[i] = 0; if (i < 16) { simdgroup_barrier(mem_flags::mem_none); }",
    "broadcast from different lanes": "out[i] = simd_broadcast(1.0f, ushort(i % 2));",
    "shuffle from lane 32": "out[i] = simd_shuffle(1.0f, ushort(i % 32 + 1));",
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence(metal_on_cpu: Interpreter, name: str, seed: int) -> None:
    metal_on_cpu.seeds = (seed,)
    fails(Divergence, LOCAL + DIVERGENCES[name], header="inline float helper(float x) { return simd_sum(x); }")


# What an optimizer could turn into two calls where the source has one, or into one where it has two.
CONVERGED = {
    "around a simd operation, the same branch twice": """
        float x = inp[i];
        if (i % 2) { x = x * 3.0f; out[i + 64] = x; }
        x = simd_sum(x);
        if (i % 2) { x = x + 1.0f; out[i + 64] = x; } else { out[i + 64] = 2; }
        out[i] = x;
    """,
    "an unrolled loop": """
        float x = inp[i];
        #pragma unroll
        for (int k = 0; k < 8; k++) {
          if (x > float(k)) { x -= 1.0f; }
          x += simd_shuffle_xor(x, ushort(1 << (k % 5)));
        }
        out[i] = x; out[i + 64] = x;
    """,
    "a loop of a length that is known at run time": """
        float x = inp[i];
        for (int k = 0; k < n; k++) {
          if (int(i) % 7 < k) { x *= 0.5f; }
          x += simd_max(x);
          if (x > 1e6f) { x = 1.0f; }
        }
        out[i] = x; out[i + 64] = x;
    """,
    "a loop until all lanes are done": """
        float x = inp[i];
        int steps = 0;
        while (simd_any(x < 4.0f)) { if (x < 4.0f) { x += 1.0f; } steps++; }
        out[i] = x; out[i + 64] = steps;
    """,
    "different operations under a uniform condition": """
        float x = n > 3 ? simd_sum(inp[i]) : simd_product(inp[i]);
        switch (n % 3) {
          case 0: x += simd_sum(x); break;
          case 1: x += simd_min(x); break;
          default: x -= simd_max(x);
        }
        if (n < 0) { return; }
        threadgroup_barrier(mem_flags::mem_none);
        out[i] = x; out[i + 64] = helper(x) + helper(x + 1.0f);
    """,
    "one simdgroup alone": """
        threadgroup float a[64];
        a[i] = inp[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = 0.0f;
        if (simdgroup_index_in_threadgroup == 1) { x = simd_sum(a[thread_index_in_simdgroup]); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < n; k++) {
          if (k % 2 == int(simdgroup_index_in_threadgroup)) { x += simd_sum(1.0f); }
        }
        out[i] = x; out[i + 64] = x;
    """,
    "a break and a continue that are uniform": """
        float x = inp[i];
        for (int k = 0; ; k++) {
          if (k == n) { break; }
          if (k % 2) { if (x > 0.0f) { x -= 1.0f; } continue; }
          x += simd_sum(x) * 0.01f;
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        out[i] = x; out[i + 64] = x;
    """,
}


@pytest.mark.parametrize("n", [5, 12])
@pytest.mark.parametrize("name", CONVERGED)
def test_converged_control_flow_is_no_divergence(metal_on_cpu: Interpreter, name: str, n: int) -> None:
    metal_on_cpu.seeds = range(4)
    header = "inline float helper(float x) { return simd_sum(x); }"
    given = {"inp": X, "n": mx.array(n)}
    run(LOCAL + CONVERGED[name], given, (128,), grid=(64, 1, 1), threadgroup=(64, 1, 1), header=header)


def test_shuffle_from_a_lane_that_an_edge_threadgroup_lacks() -> None:
    fails(
        Divergence,
        I + "out[i] = simd_shuffle_down(1.0f, ushort(1));",
        size=40,
        match="a simdgroup with 8 lanes",
    )


# ---- limits ----


def test_33_kb_of_threadgroup_memory() -> None:
    fails(ResourceLimit, LOCAL + "threadgroup float a[33 * 256]; a[i] = 1; out[i] = a[i];", match="33792 bytes")
    fails(ResourceLimit, LOCAL + "threadgroup float a[8000], b[193]; a[i] = b[i] = 1; out[i] = a[i];", match="b")
    run(LOCAL + "threadgroup float a[8192]; a[i] = 1; out[i] = a[i];", {}, (64,), threadgroup=(64, 1, 1))


@pytest.mark.parametrize("size", [(1025, 1, 1), (32, 33, 1), (16, 16, 5)])
def test_more_than_1024_threads(size: tuple[int, int, int]) -> None:
    with pytest.raises(ResourceLimit, match="1024"):
        run(I + "out[i] = 0;", {}, (64,), threadgroup=size)


def test_1024_threads_are_allowed() -> None:
    assert run(I + "out[i] = simd_sum(1.0f);", {}, (1024,), threadgroup=(1024, 1, 1)).tolist() == [32.0] * 1024


def test_too_much_thread_memory() -> None:
    source = I + "float a[100000]; for (uint k = 0; k < 100000; k++) { a[k] = inp[k % 64]; } out[i] = a[i * 7];"
    fails(ResourceLimit, source, match="thread memory")


# ---- uninitialised memory ----


def test_output_not_stored() -> None:
    error = fails(UninitialisedOutput, I + "if (i != 7) { out[i] = 1; }", match="1 of 64 elements of out")
    assert (error.buffer, error.index) == ("out", 7)  # type: ignore[attr-defined]


def test_threadgroup_memory_never_stored() -> None:
    source = (
        LOCAL
        + """
        threadgroup float a[64];
        if (i != 9) { a[i] = 1; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[i];
    """
    )
    error = fails(UninitialisedRead, source)
    assert (error.buffer, error.index) == ("a", 9)  # type: ignore[attr-defined]


def test_threadgroup_memory_of_another_threadgroup() -> None:
    source = (
        LOCAL
        + """
        threadgroup float a[32];
        if (threadgroup_position_in_grid.x == 0) { a[i] = 1; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = a[i];
    """
    )
    fails(UninitialisedRead, source, group=32)


def test_output_loaded_before_it_is_stored() -> None:
    fails(UninitialisedRead, I + "out[i] += 1;", match=r"out\[\d+\]: load of an output element")


def test_atomic_output_without_init_value() -> None:
    source = "atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);"
    fails(UninitialisedRead, source, size=1, dtype=mx.int32, atomic_outputs=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_uninitialised_local_array(dtype: mx.Dtype) -> None:
    source = I + "float a[8]; a[i % 4] = inp[i]; out[i] = static_cast<T>(a[i % 4] + a[i % 4 + i / 16]);"
    fails(UninitialisedRead, source, dtype=dtype, template=[("T", dtype)], match="uninitialised variable")


def test_uninitialised_local_scalar() -> None:
    fails(MetalCompileError, I + "float x; if (i > 4) { x = 1; } out[i] = x;", match="uninitialized")


def test_endless_loop(metal_on_cpu: Interpreter) -> None:
    metal_on_cpu.seconds = 1
    fails(Runaway, I + "uint n = 0; while (inp[n % 64] < 1e9f) { n++; } out[i] = n;", match="1 seconds")


def test_division_by_zero() -> None:
    fails(ArithmeticFault, I + "out[i] = 7 / (int(i) - 5);", match="division by zero")


# ---- what does not compile ----

REJECTED: dict[str, tuple[str, str]] = {
    "device to thread pointer": ("thread const float* p = inp; out[i] = p[i];", "thread"),
    "device to threadgroup pointer": ("threadgroup float* p = out; out[i] = p[i];", "threadgroup"),
    "C cast between address spaces": ("out[i] = *(const thread float*)inp;", "address space"),
    "constant written": ("small[0] = 1; out[i] = 0;", "read-only|const"),
    "constant written through a cast": ("((constant float*)small)[0] = 1; out[i] = 0;", "read-only|const"),
    "const buffer written": ("inp[i] = 1; out[i] = 0;", "read-only"),
    "pointer without address space": ("const float* p = inp; out[i] = p[i];", "names no address space"),
    "reference without address space": ("float x = 1; float& y = x; out[i] = y;", "names no address space"),
    "cast to a pointer without address space": (
        "out[i] = *(const float*)(inp + i);",
        "names no address space",
    ),
    "double": ("double x = 1; out[i] = float(x);", "double"),
    "implicit float to bfloat": ("bfloat x = inp[i]; out[i] = x;", "bfloat"),
    "implicit float to bfloat, exact literal": ("bfloat x = 3.0f; out[i] = x;", "bfloat"),
    "implicit float to bfloat in an expression": (
        "bfloat x = bfloat(1.0f); x = x * 2.0f; out[i] = x;",
        "bfloat",
    ),
    "half to bfloat": ("half h = 1.0h; bfloat x = h; out[i] = x;", "bfloat"),
    "implicit float to bfloat in a helper": ("out[i] = to_bfloat(inp[i]);", "bfloat"),
    "half and bfloat in one expression": (
        "half h = 1.0h; bfloat x = bfloat(1.0f); out[i] = float(h + x);",
        "bfloat",
    ),
    "bfloat to half": ("bfloat x = bfloat(1.0f); half h = x; out[i] = h;", "bfloat"),
    "atomic float in threadgroup memory": ("threadgroup atomic<float> a; out[i] = 0;", "device memory alone"),
    "atomic minimum of floats": (
        "atomic_fetch_min_explicit((device atomic<float>*)out, 1.0f, memory_order_relaxed);",
        "atomic_fetch_min",
    ),
    "vector comparison": ("float4 a = inp[i]; out[i] = float((a < float4(1.0f)).x);", "vector comparison"),
    "variable length array": ("float a[i]; out[i] = 0;", "not a constant expression"),
    "static variable": ("static float x = 0; out[i] = x++;", "static|constant address space"),
    "function pointer": (
        "float (*f)(float) = tanh; out[i] = f(1.0f);",
        "pointers to functions|function pointer",
    ),
    "vector of the wrong size": ("float4 a = float3(1.0f); out[i] = a.x;", "cannot initialize|vector"),
    "vector to scalar": ("uint j = thread_position_in_threadgroup; out[i] = j;", "cannot initialize"),
    "OpenCL swizzle": ("float4 v = float4(1.0f); out[i] = v.s0;", "swizzle"),
    "OpenCL function": ("out[i] = native_exp(inp[i]);", "native_exp"),
    "OpenCL work item": ("out[get_global_id(0)] = 1;", "get_global_id"),
    "OpenCL barrier": ("barrier(1); out[i] = 0;", "barrier"),
    "OpenCL conversion": ("out[i] = convert_float(1);", "convert_float"),
    "OpenCL vector literal": ("float4 v = (float4)(1, 2, 3, 4); out[i] = v.x;", "constructor"),
    "OpenCL qualifier": ("__global const float* p = inp; out[i] = p[i];", "__global"),
    "C library": ("out[i] = expf(inp[i]);", "expf"),
    "compiler builtin": ("out[i] = __builtin_expf(inp[i]);", "__builtin_expf"),
    "this package's own": ("out[i] = mc_lane();", "mc_lane"),
    "standard library": ("out[i] = std::exp(inp[i]);", "std"),
    "ambiguous max": ("out[i] = max(1, 2u);", "ambiguous"),
    "exp of an integer": ("out[i] = exp(int(i));", "ambiguous"),
    "lambda": ("auto f = [](float x) { return x; }; out[i] = f(1.0f);", "lambda"),
    "goto": ("goto end; end: out[i] = 0;", "goto"),
    "new": ("thread float* p = new float; out[i] = *p;", "new"),
    "threadgroup initialiser": ("threadgroup float a[1] = {0}; out[i] = a[0];", "initialiser"),
    "mixed vector sizes": (
        "float4 v = float4(float2(1.0f), 1.0f); out[i] = v.x;",
        "wrong number of elements",
    ),
    "implicit vector conversion": ("float4 v = half4(1.0h); out[i] = v.x;", "half4"),
    "constant small buffer to a device helper": ("out[i] = first(small);", "constant"),
    "atomic of half": ("threadgroup atomic<half> a; out[i] = 0;", "atomics are of"),
    "undeclared name": ("out[i] = nothing;", "nothing"),
    "missing template argument": ("out[i] = T(0);", "'T'"),
    "syntax": ("out[i] = ;", "expected"),
}
HELPERS = {
    "to_bfloat": "inline bfloat to_bfloat(float x) { return x; }",
    "first": "template <typename U> U first(const device U* p) { return p[0]; }",
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name: str) -> None:
    source, match = REJECTED[name]
    header = "".join(helper for called, helper in HELPERS.items() if called in source)
    fails(MetalCompileError, I + source, inputs={"inp": X, "small": values(3)}, header=header, match=match)


REJECTED_HEADERS: dict[str, tuple[str, str]] = {
    "program scope variable": ("float counter;", "constant address space"),
    "program scope const": ("const float PI = 3;", "constant address space"),
    "threadgroup variable in a helper": (
        "inline float f() { threadgroup float x[2]; x[0] = 1; return x[0]; }",
        "threadgroup",
    ),
    "helper without address space": (
        "inline float f(const float* p) { return *p; }",
        "names no address space",
    ),
    "C++ header": ("#include <cmath>", "cmath"),
    "OpenCL header": ("#include <opencl-c.h>", "opencl-c.h"),
}


@pytest.mark.parametrize("name", REJECTED_HEADERS)
def test_rejected_header(name: str) -> None:
    header, match = REJECTED_HEADERS[name]
    fails(MetalCompileError, I + "out[i] = 0;", header=header, match=match)


def test_small_input_fits_a_constant_helper_alone() -> None:
    header = "inline float first(const constant float* p) { return p[0]; }"
    assert run(I + "out[i] = first(a);", {"a": values(7)}, (1,), header=header).size == 1
    fails(MetalCompileError, I + "out[i] = first(a);", inputs={"a": values(8)}, header=header, match="first")


def test_compile_error_names_metals_address_spaces_and_the_line() -> None:
    error = fails(MetalCompileError, I + "out[i] = 0;\nthread float* p = out;\n")
    assert "device float" in str(error)
    assert "__global" not in str(error)
    assert "thread float* p = out;" in str(error)


# ---- the call itself ----


def test_arguments_are_checked_as_mlx_checks_them() -> None:
    kernel: Any = mx.fast.metal_kernel(name="test", input_names=["a"], output_names=["out"], source="out[0] = a[0];")

    def call(inputs: Sequence[mx.array], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[mx.Dtype]) -> object:
        return kernel(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, grid=(1, 1, 1), threadgroup=(1, 1, 1))

    fine: dict[str, Any] = {"inputs": [X], "output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    sizes: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    assert len(kernel(**fine, **sizes, stream=mx.gpu)) == 1
    with pytest.raises(TypeError):
        kernel([X], **fine, **sizes)
    with pytest.raises(TypeError, match="three numbers"):
        kernel(**fine, grid=(1, 1), threadgroup=(1, 1, 1))
    with pytest.raises(ValueError, match="template"):
        kernel(**fine, **sizes, template=[("N", np.int32(3))])
    for stream in (mx.cpu, mx.default_stream(mx.cpu), mx.Device(mx.cpu)):
        with pytest.raises(ValueError, match="GPU"):
            kernel(**fine, **sizes, stream=stream)
    with pytest.raises(ValueError, match="inputs"):
        call([], [(1,)], [mx.float32])
    with pytest.raises(ValueError, match="output_shapes"):
        call([X], [], [mx.float32])
    with pytest.raises(ValueError, match="output_dtypes"):
        call([X], [(1,)], [])
    with pytest.raises(ValueError, match="at least one output"):
        mx.fast.metal_kernel(name="test", input_names=[], output_names=[], source="")
    with pytest.raises(ValueError, match="math_mode"):
        mx.fast.metal_kernel(
            name="test",
            input_names=[],
            output_names=["o"],
            source="",
            compile_options={"math_mode": "precise"},
        )


def test_an_error_leaves_the_interpreter_usable() -> None:
    for _ in range(3):
        fails(DataRace, LOCAL + RACES["lanes of one simdgroup"])
        assert run(I + "out[i] = 1;", {}, (3,)).tolist() == [1.0] * 3


def test_unchecked_mode_still_meets_the_guards(tmp_path: Path) -> None:
    with Interpreter(checked=False).installed():
        fails(OutOfBounds, I + "out[i] = inp[i + (1 << 20)];", match="memory fault")
        fails(Divergence, LOCAL + DIVERGENCES["barrier in a branch"])
        fails(ResourceLimit, LOCAL + "threadgroup float a[33 * 256]; a[i] = 1; out[i] = a[i];")


def test_objects_come_from_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        with Interpreter(cache=tmp_path).installed():
            assert run(I + "out[i] = 1;", {}, (2,)).tolist() == [1.0, 1.0]
        objects = [path for path in tmp_path.glob("*.so") if not path.name.startswith("runtime")]
        assert len(objects) == 1
