"""Kernels that Metal accepts run here and give MLX's and NumPy's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from . import Interpreter
from .signature import TemplateArgument

pytestmark = pytest.mark.usefixtures("metal_on_cpu")

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def run(
    source: str,
    inputs: Mapping[str, mx.array | float],
    shape: Sequence[int],
    dtype: mx.Dtype = mx.float32,
    *,
    grid: tuple[int, int, int] | None = None,
    threadgroup: tuple[int, int, int] = (32, 1, 1),
    template: Sequence[tuple[str, TemplateArgument]] | None = None,
    header: str = "",
    init_value: float | None = None,
    atomic_outputs: bool = False,
    ensure_row_contiguous: bool = True,
) -> mx.array:
    kernel: Any = mx.fast.metal_kernel(
        name="test",
        input_names=list(inputs),
        output_names=["out"],
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
    )
    out: mx.array
    (out,) = kernel(
        inputs=list(inputs.values()),
        template=template,
        grid=grid or (int(np.prod(shape)), 1, 1),
        threadgroup=threadgroup,
        output_shapes=[tuple(shape)],
        output_dtypes=[dtype],
        init_value=init_value,
    )
    return out


def values(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    if dtype in FLOATS:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return mx.array(rng.integers(-50 if dtype != mx.uint32 else 0, 50, shape)).astype(dtype)


def close(a: mx.array, b: mx.array, tolerance: float = 1e-6) -> bool:
    return bool(mx.allclose(a.astype(mx.float32), b.astype(mx.float32), rtol=tolerance, atol=tolerance).item())


# ---- MLX's documented examples, written anew ----


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elementwise_exp(dtype: mx.Dtype) -> None:
    x = values(5, 37, dtype=dtype)
    source = "uint i = thread_position_in_grid.x;\nT x = inp[i];\nout[i] = metal::exp(x);"
    out = run(source, {"inp": x}, x.shape, dtype, template=[("T", dtype)], threadgroup=(256, 1, 1))
    assert out.dtype == dtype
    assert close(out, mx.exp(x), {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 1e-2}[dtype])


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, mx.int32], ids=str)
def test_strided_input(dtype: mx.Dtype, contiguous: bool) -> None:
    x = mx.transpose(values(6, 4, 10, dtype=dtype)[::2, :, 1::3], (2, 0, 1))
    at = "i" if contiguous else "elem_to_loc(i, inp_shape, inp_strides, inp_ndim)"
    source = f"uint i = thread_position_in_grid.x;\nout[i] = inp[{at}];"
    assert mx.array_equal(run(source, {"inp": x}, x.shape, dtype, ensure_row_contiguous=contiguous), x)


def test_broadcast_input_has_stride_zero() -> None:
    x = mx.broadcast_to(values(1, 9), (4, 9))
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = inp[(i / 9) * inp_strides[0] + (i % 9) * inp_strides[1]] + inp_strides[0];
    """
    assert mx.array_equal(run(source, {"inp": x}, x.shape, ensure_row_contiguous=False), x)


def test_grid_sample() -> None:
    image, points = values(2, 5, 6, 3), values(2, 4, 4, 2, seed=1)
    header = """
        template <typename T>
        T pixel(const device T* image, const constant int* shape, int n, int y, int x, int c) {
          bool inside = y >= 0 && y < shape[1] && x >= 0 && x < shape[2];
          return inside ? image[((n * shape[1] + y) * shape[2] + x) * shape[3] + c] : T(0);
        }
    """
    source = """
        uint i = thread_position_in_grid.x;
        int channels = image_shape[3];
        int c = i % channels;
        int point = i / channels;
        int n = point / (points_shape[1] * points_shape[2]);
        float2 at = float2(points[point * 2], points[point * 2 + 1]);
        float x = ((at.x + 1) * image_shape[2] - 1) / 2;
        float y = ((at.y + 1) * image_shape[1] - 1) / 2;
        int left = int(floor(x)), top = int(floor(y));
        float sum = 0;
        for (int dy = 0; dy < 2; dy++) {
          for (int dx = 0; dx < 2; dx++) {
            float weight = (1 - metal::abs(x - float(left + dx))) * (1 - metal::abs(y - float(top + dy)));
            sum += weight * pixel(image, image_shape, n, top + dy, left + dx, c);
          }
        }
        out[i] = sum;
    """
    out = run(source, {"image": image, "points": points}, (2, 4, 4, 3), header=header)
    a, p = np.array(image), np.array(points)
    want = np.zeros((2, 4, 4, 3))
    for n, i, j in np.ndindex(2, 4, 4):
        x, y = ((p[n, i, j, 0] + 1) * 6 - 1) / 2, ((p[n, i, j, 1] + 1) * 5 - 1) / 2
        for yy in (int(np.floor(y)), int(np.floor(y)) + 1):
            for xx in (int(np.floor(x)), int(np.floor(x)) + 1):
                if 0 <= yy < 5 and 0 <= xx < 6:
                    want[n, i, j] += (1 - abs(x - xx)) * (1 - abs(y - yy)) * a[n, yy, xx]
    np.testing.assert_allclose(np.array(out), want, atol=1e-5)


@pytest.mark.parametrize("dtype", [*FLOATS, mx.int32], ids=str)
def test_row_sum_in_two_steps(dtype: mx.Dtype) -> None:
    """simd_sum, threadgroup memory, barrier, simd_sum."""
    x = values(7, 300, dtype=dtype)
    source = """
        constexpr int N = 300;
        threadgroup A partial[32];
        uint row = threadgroup_position_in_grid.y;
        A sum = 0;
        for (uint i = thread_position_in_threadgroup.x; i < N; i += threads_per_threadgroup.x) {
          sum += static_cast<A>(inp[row * N + i]);
        }
        sum = simd_sum(sum);
        if (thread_index_in_simdgroup == 0) {
          partial[simdgroup_index_in_threadgroup] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup_index_in_threadgroup == 0) {
          uint lane = thread_index_in_simdgroup;
          sum = simd_sum(lane < simdgroups_per_threadgroup ? partial[lane] : A(0));
          if (lane == 0) {
            out[row] = static_cast<T>(sum);
          }
        }
    """
    wide = mx.int32 if dtype == mx.int32 else mx.float32
    template = [("T", dtype), ("A", wide)]
    out = run(source, {"inp": x}, (7,), dtype, grid=(128, 7, 1), threadgroup=(128, 1, 1), template=template)
    assert close(out, x.astype(wide).sum(axis=1), {mx.float16: 1e-2, mx.bfloat16: 1e-1}.get(dtype, 1e-5))


def test_atomic_outputs() -> None:
    x = mx.array(np.random.default_rng(0).integers(0, 10, 1000), mx.int32)
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[inp[i]], 1, memory_order_relaxed);
    """
    out = run(source, {"inp": x}, (10,), mx.int32, grid=(1000, 1, 1), init_value=0, atomic_outputs=True)
    assert out.tolist() == np.bincount(np.array(x), minlength=10).tolist()
    out = run(source, {"inp": x}, (10,), mx.float32, grid=(1000, 1, 1), init_value=0.5, atomic_outputs=True)
    assert out.tolist() == (np.bincount(np.array(x), minlength=10) + 0.5).tolist()


# ---- threads ----


def test_attributes_of_uneven_threadgroups() -> None:
    """dispatchThreads: the grid counts threads, the last threadgroup of a row is smaller."""
    source = """
        uint3 p = thread_position_in_grid;
        uint i = (p.z * threads_per_grid.y + p.y) * threads_per_grid.x + p.x;
        out[i * 8] = threadgroup_position_in_grid.x * 100 + threadgroup_position_in_grid.y;
        out[i * 8 + 1] = threads_per_threadgroup.x * 100 + threads_per_threadgroup.y;
        out[i * 8 + 2] = dispatch_threads_per_threadgroup.x * 100 + dispatch_threads_per_threadgroup.y;
        out[i * 8 + 3] = thread_index_in_threadgroup;
        out[i * 8 + 4] = simdgroup_index_in_threadgroup * 100 + thread_index_in_simdgroup;
        out[i * 8 + 5] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y;
        out[i * 8 + 6] = simdgroups_per_threadgroup * 100 + threads_per_simdgroup;
        out[i * 8 + 7] = thread_position_in_threadgroup.y * 100 + thread_position_in_threadgroup.x;
    """
    out = np.array(run(source, {}, (2, 11, 21, 8), mx.uint32, grid=(21, 11, 2), threadgroup=(10, 8, 1)))
    for z, y, x in np.ndindex(2, 11, 21):
        width, height = min(10, 21 - x // 10 * 10), min(8, 11 - y // 8 * 8)
        index = y % 8 * width + x % 10
        assert out[z, y, x].tolist() == [
            x // 10 * 100 + y // 8,
            width * 100 + height,
            1008,
            index,
            index // 32 * 100 + index % 32,
            302,
            -(-width * height // 32) * 100 + 32,
            y % 8 * 100 + x % 10,
        ]


def test_threadgroup_larger_than_the_grid() -> None:
    assert (
        run("out[thread_position_in_grid.x] = threads_per_threadgroup.x;", {}, (5,), threadgroup=(64, 1, 1)).tolist()
        == [5.0] * 5
    )


# ---- simd operations, against NumPy, lane by lane ----

SIMD: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], object]]] = {
    "sum": ("simd_sum(x)", lambda x, lane: x.sum() + 0 * x),
    "product": ("simd_product(x)", lambda x, lane: np.prod(x) + 0 * x),
    "max": ("simd_max(x)", lambda x, lane: x.max() + 0 * x),
    "min": ("simd_min(x)", lambda x, lane: x.min() + 0 * x),
    "inclusive sum": ("simd_prefix_inclusive_sum(x)", lambda x, lane: x.cumsum()),
    "exclusive sum": ("simd_prefix_exclusive_sum(x)", lambda x, lane: x.cumsum() - x),
    "inclusive product": ("simd_prefix_inclusive_product(x)", lambda x, lane: x.cumprod()),
    "exclusive product": ("simd_prefix_exclusive_product(x)", lambda x, lane: np.r_[1, x.cumprod()[:-1]]),
    "shuffle": ("simd_shuffle(x, ushort((lane * 7) % 32))", lambda x, lane: x[lane * 7 % 32]),
    "xor": ("simd_shuffle_xor(x, ushort(5))", lambda x, lane: x[lane ^ 5]),
    "up": ("simd_shuffle_up(x, ushort(3))", lambda x, lane: np.where(lane < 3, x, np.roll(x, 3))),
    "down": ("simd_shuffle_down(x, ushort(3))", lambda x, lane: np.where(lane > 28, x, np.roll(x, -3))),
    "rotate up": ("simd_shuffle_rotate_up(x, ushort(3))", lambda x, lane: np.roll(x, 3)),
    "rotate down": ("simd_shuffle_rotate_down(x, ushort(3))", lambda x, lane: np.roll(x, -3)),
    "fill up": (
        "simd_shuffle_and_fill_up(x, T(9), ushort(3))", lambda x, lane: np.where(lane < 3, 9, np.roll(x, 3))),
    "fill down": (
        "simd_shuffle_and_fill_down(x, T(9), ushort(3))",
        lambda x, lane: np.where(lane > 28, 9, np.roll(x, -3))),
    "broadcast": ("simd_broadcast(x, ushort(11))", lambda x, lane: x[11] + 0 * x),
    "broadcast first": ("simd_broadcast_first(x)", lambda x, lane: x[0] + 0 * x),
    "any": ("T(simd_any(x > T(1)))", lambda x, lane: (x > 1).any() + 0 * x),
    "all": ("T(simd_all(x > T(-100)))", lambda x, lane: (x > -100).all() + 0 * x),
    "vector": ("simd_sum(vec<T, 2>(x, T(1))).y", lambda x, lane: 32 + 0 * x),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int32], ids=str)
@pytest.mark.parametrize("name", SIMD)
def test_simd_operation(name: str, dtype: mx.Dtype) -> None:
    call, want = SIMD[name]
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (4, 32)).astype(np.float64)
    if "product" in name:
        x = rng.choice([1, 2, -1] if dtype == mx.int32 else [0.5, -1.0, 1.0, 2.0], (4, 32))
        x[:, 9:] = 1  # within the range of half
    source = f"""
        uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
        T x = inp[i];
        out[i] = {call} + T(lane * 0);
    """
    given = mx.array(x.astype(np.float32)).astype(dtype)
    out = run(source, {"inp": given}, (4, 32), dtype, template=[("T", dtype)], threadgroup=(64, 1, 1))
    expected = np.stack([np.asarray(want(row, np.arange(32)), np.float64) for row in x])
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, rtol=1e-3)


def test_bitwise_simd_operations_and_ballot() -> None:
    x = values(64, dtype=mx.uint32)
    source = """
        uint i = thread_position_in_grid.x;
        uint x = inp[i];
        out[i * 4] = simd_and(x | 4u);
        out[i * 4 + 1] = simd_or(x);
        out[i * 4 + 2] = simd_xor(x);
        out[i * 4 + 3] = uint(ulong(simd_ballot(x % 2 == 1)));
    """
    out = np.array(run(source, {"inp": x}, (64, 4), mx.uint32, grid=(64, 1, 1)))
    for g, row in enumerate(np.array(x).reshape(2, 32)):
        ballot = sum(1 << i for i in range(32) if row[i] % 2)
        want = [np.bitwise_and.reduce(row | 4), np.bitwise_or.reduce(row), np.bitwise_xor.reduce(row), ballot]
        assert (out[32 * g : 32 * g + 32] == want).all()


def test_simd_sum_of_bfloat_is_mlxs_overload() -> None:
    x = values(32, dtype=mx.bfloat16)
    source = "bfloat16_t x = inp[thread_position_in_grid.x];\nout[thread_position_in_grid.x] = simd_sum(x);"
    assert close(run(source, {"inp": x}, (32,), mx.bfloat16), x.astype(mx.float32).sum(), 2e-2)


def test_last_simdgroup_of_an_edge_threadgroup_has_fewer_lanes() -> None:
    out = run("out[thread_position_in_grid.x] = simd_sum(1.0f);", {}, (70,), threadgroup=(64, 1, 1))
    assert out.tolist() == [32.0] * 64 + [6.0] * 6


# ---- types and functions ----


def test_vectors_of_half_and_bfloat() -> None:
    h, b = values(64, dtype=mx.float16), values(64, dtype=mx.bfloat16, seed=2)
    source = """
        uint i = thread_position_in_grid.x * 4;
        float4 x = float4(*(const device half4*)(h + i));
        float4 y = float4(*(const device vec<bfloat16_t, 4>*)(b + i));
        float4 z = fma(x, y, float4(1.0f)) + float4(x.xy, 0.0f, 2.0f);
        *(device float4*)(out + i) = select_lowest(z);
    """
    header = "inline float4 select_lowest(float4 v) { return min(v, vec<float, 4>(3.0f)); }"
    out = run(source, {"h": h, "b": b}, (64,), grid=(16, 1, 1), header=header)
    x, y = h.astype(mx.float32), b.astype(mx.float32)
    extra = mx.concatenate([x.reshape(16, 4)[:, :2], mx.zeros((16, 1)), mx.full((16, 1), 2.0)], axis=1).reshape(64)
    assert close(out, mx.minimum(x * y + 1 + extra, 3.0))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp(x)": np.exp,
    "metal::fast::exp(x)": np.exp,
    "metal::precise::exp(x)": np.exp,
    "exp2(x)": np.exp2,
    "log(abs(x))": lambda x: np.log(np.abs(x)),
    "metal::precise::log2(fabs(x))": lambda x: np.log2(np.abs(x)),
    "tanh(x)": np.tanh,
    "precise::tanh(x)": np.tanh,
    "rsqrt(abs(x))": lambda x: 1 / np.sqrt(np.abs(x)),
    "sqrt(abs(x))": lambda x: np.sqrt(np.abs(x)),
    "fma(x, 2.0f, 1.0f)": lambda x: x * 2 + 1,
    "max(x, 0.5f)": lambda x: np.maximum(x, 0.5),
    "min(x, 0.5f)": lambda x: np.minimum(x, 0.5),
    "clamp(x, -0.5f, 0.5f)": lambda x: np.clip(x, -0.5, 0.5),
    "select(x, 0.0f, x < 0.0f)": lambda x: np.where(x < 0, 0, x),
    "sign(x) * floor(x)": lambda x: np.sign(x) * np.floor(x),
    "pow(abs(x), 1.5f)": lambda x: np.abs(x) ** 1.5,
    "sin(x) + cos(x)": lambda x: np.sin(x) + np.cos(x),
    "float(isnan(x) || isinf(x - INFINITY))": lambda x: np.ones_like(x),
    "as_type<float>(as_type<uint>(x) ^ 0x80000000u)": lambda x: -x,
    "static_cast<float>(static_cast<half>(x))": lambda x: x.astype(np.float16).astype(np.float32),
    "float(max(int(x), 1)) + float(clamp(2u, 0u, 1u))": lambda x: np.maximum(x.astype(int), 1) + 1.0,
    "mix(x, 1.0f, 0.25f) + step(0.0f, x)": lambda x: x + (1 - x) * 0.25 + (x >= 0),
    "dot(float3(x, 1.0f, 2.0f), float3(1.0f))": lambda x: x + 3,
    "numeric_limits<float>::infinity() * sign(x)": lambda x: np.inf * np.sign(x),
    "float(popcount(7u) + clz(1u) + ctz(8u)) + 0.0f * x": lambda x: 3 + 31 + 3 + 0 * x,
}


@pytest.mark.parametrize("expression", FUNCTIONS)
def test_function(expression: str) -> None:
    x = values(32)
    out = run(f"uint i = thread_position_in_grid.x;\nfloat x = inp[i];\nout[i] = {expression};", {"inp": x}, (32,))
    np.testing.assert_allclose(np.array(out), FUNCTIONS[expression](np.array(x)), rtol=2e-6, atol=1e-6)


def test_explicit_cast_between_half_and_bfloat() -> None:
    x = values(32, dtype=mx.float16)
    source = "uint i = thread_position_in_grid.x;\nout[i] = static_cast<T>(inp[i]);"
    out = run(source, {"inp": x}, (32,), mx.bfloat16, template=[("T", mx.bfloat16)])
    assert mx.array_equal(out, x.astype(mx.bfloat16))


def test_half_and_bfloat_arithmetic_rounds_each_operation() -> None:
    x = values(64, dtype=mx.bfloat16)
    y = values(64, dtype=mx.bfloat16, seed=1)
    source = "uint i = thread_position_in_grid.x;\nout[i] = a[i] * b[i] + a[i];"
    out = run(source, {"a": x, "b": y}, (64,), mx.bfloat16)
    assert mx.array_equal(out, (x * y) + x)
    x, y = x.astype(mx.float16), y.astype(mx.float16)
    assert mx.array_equal(run(source, {"a": x, "b": y}, (64,), mx.float16), (x * y) + x)


@pytest.mark.parametrize(
    "dtype",
    [mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64, *FLOATS],
    ids=str,
)
def test_copies_every_dtype(dtype: mx.Dtype) -> None:
    x = (values(40) * 20).astype(dtype)
    out = run("out[thread_position_in_grid.x] = inp[thread_position_in_grid.x];", {"inp": x}, (40,), dtype)
    assert out.dtype == dtype
    assert mx.array_equal(out, x)


def test_templates_constants_and_structs() -> None:
    header = """
        constant constexpr int STEP = 3;
        constant float TABLE[4] = {1.0f, 10.0f, 100.0f, 1000.0f};
        struct Pair {
          float a;
          float b;
          float sum() const thread { return a + b; }
        };
        template <typename U, int N>
        struct Tile {
          U data[N];
          void fill(U value) thread {
            #pragma unroll
            for (int i = 0; i < N; i++) { data[i] = value; }
          }
        };
        inline Pair both(const device float* x, threadgroup float* y, uint i) { return Pair{x[i], y[i]}; }
    """
    source = """
        uint i = thread_position_in_grid.x;
        threadgroup float shared[32], other[2][16];
        threadgroup uint count;
        shared[i] = TABLE[i % 4];
        other[i / 16][i % 16] = 1.0f;
        if (i == 0) { count = 5; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Tile<T, N> tile;
        tile.fill(T(STEP));
        if constexpr (FLAG) {
          float sum = both(inp, shared, i).sum() + other[1 - i / 16][i % 16];
          out[i] = sum + float(tile.data[N - 1]) + float(count);
        }
    """
    x = values(32)
    out = run(source, {"inp": x}, (32,), header=header, template=[("T", mx.float16), ("N", 4), ("FLAG", True)])
    assert close(out, x + mx.array([1.0, 10.0, 100.0, 1000.0] * 8) + 9)


def test_small_and_scalar_inputs_are_constant() -> None:
    source = "out[thread_position_in_grid.x] = small[thread_position_in_grid.x] + scalar + small_shape[0];"
    out = run(source, {"small": mx.array([1.0, 2.0, 3.0]), "scalar": 0.5}, (3,))
    assert out.tolist() == [4.5, 5.5, 6.5]


def test_names_that_are_keywords_of_opencl() -> None:
    assert run("float local = 1, global = 2; out[0] = local + global;", {}, (1,)).tolist() == [3.0]


def test_init_value_fills_what_is_not_stored() -> None:
    out = run("if (thread_position_in_grid.x == 1) { out[1] = 5; }", {}, (3,), mx.int32, init_value=7)
    assert out.tolist() == [7, 5, 7]


def test_loads_and_stores_are_counted(metal_on_cpu: Interpreter) -> None:
    x = values(64)
    source = """
        uint i = thread_position_in_grid.x * 4;
        *(device float4*)(out + i) = *(const device float4*)(inp + i) + inp[0];
    """
    run(source, {"inp": x}, (64,), grid=(16, 1, 1))
    launch = metal_on_cpu.last_launch("test")
    assert launch.loads == {"inp": 64 + 16, "out": 0}
    assert launch.stores == {"inp": 0, "out": 64}
    assert launch.load_bytes["inp"] == 4 * 80


def test_device_memory_written_and_read_back_across_a_barrier() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        out[i] = i;
        threadgroup_barrier(mem_flags::mem_device);
        float x = out[63 - i];
        threadgroup_barrier(mem_flags::mem_device);
        out[i] = x;
    """
    assert run(source, {}, (64,), threadgroup=(64, 1, 1)).tolist() == list(range(63, -1, -1))


def test_atomics_in_threadgroup_memory() -> None:
    source = """
        threadgroup atomic_uint counter;
        if (thread_position_in_grid.x == 0) {
          atomic_store_explicit(&counter, 0u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_max_explicit(&counter, thread_position_in_grid.x, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = atomic_load_explicit(&counter, memory_order_relaxed);
    """
    assert run(source, {}, (64,), mx.uint32, threadgroup=(64, 1, 1)).tolist() == [63] * 64
