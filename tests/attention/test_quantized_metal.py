"""The Metal kernels over quantized pools: right for all types, sizes and groups, and each byte is read once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import metal as metal_backend
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import AttentionShape, KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import QkvKind, QkvShape
from mlxpaged.attention.quantization import Quantization, quantization_of
from mlxpaged.attention.self_check import CASES, check_fusions, fused_steps, self_check
from mlxpaged.attention.tuning import CONTIGUOUS, MATRIX, Tuning
from tests.attention.metal_cases import TOLERANCE, Case
from tests.attention.test_quantization import INT8, LAYOUTS, PLACE
from tests.attention.test_shared_memory import BLOCKS, TABLES, VIEWS, run_layers
from tests.metal_on_cpu import Interpreter
from tests.support import every

TYPES = [mx.float16, mx.float32, mx.bfloat16]
SIZES = [64, 96, 128, 256]
KINDS = [(dtype, size, kind) for kind in ("int8", "int4") for size in SIZES for dtype in TYPES]
PATHS = {
    "default": Tuning(),
    "contiguous": Tuning(decode=CONTIGUOUS, chunks=CONTIGUOUS),
    "matrix": Tuning(chunks=MATRIX),
}
LENS = [(1, 70), (1, 1), (5, 40), (2, 33), (40, 40)]


def options(dtype: mx.Dtype, size: int, kind: str) -> dict[str, Any]:
    return {"dtype": dtype, "head_dim": size, "quantization": quantization_of(kind, size, size)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dtype", "size", "kind"), every(4, KINDS))
def test_attention_over_quantized_keys_and_values(
    metal: None, dtype: mx.Dtype, size: int, kind: str, path: str
) -> None:
    """All slots of other tokens have scales that are NaN. Keys and values that are copied are rounded to the type."""
    case = Case(LENS, tuning=PATHS[path], **options(dtype, size, kind))
    assert case.error() <= (1 if dtype == mx.float32 else 2) * TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("group", [1, 6])
def test_extras_and_ranges_of_quantized_keys(metal: None, block_size: int, group: int) -> None:
    local: dict[str, Any] = {"block_size": block_size, "group": group, "softcap": 2.0, "has_sinks": True}
    ranges = {"decode_partition": 64, "chunk_partition": 32}
    for kind in ("int8", "int4"):
        Case([(1, 150), (1, 9), (7, 90)], **options(mx.float32, 128, kind), **local, **ranges).check()


@pytest.mark.parametrize(("dtype", "size", "kind"), every(5, KINDS))
def test_what_is_written_is_what_mlx_quantizes(metal: None, dtype: mx.Dtype, size: int, kind: str) -> None:
    layout = KVLayout(2, size, size, dtype, 8, quantization=quantization_of(kind, size, size))
    assert layout.quantization is not None
    keys, values = (mx.random.normal((9, 2, size), key=mx.random.key(i)).astype(dtype) for i in range(2))
    keys[1], values[2], keys[3], values[4] = 0.0, 5.0, mx.abs(keys[3]), -mx.abs(values[4])
    caches = [LayerKVCache.from_layout(4, layout, backend) for backend in ("metal", "gather")]
    for kv in caches:
        kv.write(keys, values, AttentionMetadata.build([9], [12], [[3, 1]], block_size=8))
    for got, expected in zip(*(kv.read_blocks([3, 1]) for kv in caches), strict=True):
        np.testing.assert_array_equal(np.array(got.view(mx.uint8)), np.array(expected.view(mx.uint8)))


@pytest.mark.parametrize(("kind", "key_bytes", "value_bytes"), [("int8", 128, 128), ("int4", 128, 64)])
def test_decode_reads_every_byte_once(
    metal_on_cpu: Interpreter, monkeypatch: pytest.MonkeyPatch, kind: str, key_bytes: int, value_bytes: int
) -> None:
    monkeypatch.setattr(metal_backend, "FULL_DEVICE", 0)  # as with many sequences: a threadgroup has all heads
    case = Case([(1, 1), (1, 33), (1, 300)], kv_heads=2, group=4, **options(mx.float16, 128, kind))
    case.check()
    launch = metal_on_cpu.last_launch("paged_decode_quantized")
    rows = (1 + 33 + 300) * 2
    assert launch.load_bytes["keys"] == rows * key_bytes
    assert launch.load_bytes["values"] == rows * value_bytes


@pytest.mark.parametrize(("kind", "key_bytes", "value_bytes"), [("int8", 128, 128), ("int4", 128, 64)])
@pytest.mark.parametrize("path", ["default", "matrix"])
def test_chunks_read_every_byte_once_for_each_tile(
    metal_on_cpu: Interpreter, path: str, kind: str, key_bytes: int, value_bytes: int
) -> None:
    case = Case([(8, 60)], kv_heads=2, group=4, tuning=PATHS[path], **options(mx.float16, 128, kind))
    case.check()
    kernel = "paged_attention_quantized" if path == "default" else "matrix_attention_quantized"
    launch = metal_on_cpu.last_launch(kernel)
    assert launch.load_bytes["keys"] == 60 * 2 * key_bytes
    assert launch.load_bytes["values"] == 60 * 2 * value_bytes


def test_a_row_is_read_and_written_once_when_it_is_quantized(metal_on_cpu: Interpreter) -> None:
    case = Case([(5, 5)], kv_heads=2, **options(mx.float16, 128, "int4"))
    launch = metal_on_cpu.last_launch("kv_quantize")
    assert launch.load_bytes["new_keys"] == launch.load_bytes["new_values"] == 5 * 2 * 128 * 2
    assert launch.store_bytes["key_pool"] == 5 * 2 * 128
    assert launch.store_bytes["value_pool"] == 5 * 2 * 64
    assert launch.store_bytes["scales"] == 5 * 2 * case.layout.planes[2].shape[-1] * 2


def test_blocks_of_three_planes_move_and_the_pool_grows(metal: None) -> None:
    layout = KVLayout(2, 64, 64, mx.float16, 8, quantization=INT8)
    kv = LayerKVCache.from_layout(4, layout, "metal")
    random = np.random.default_rng(0)
    noise = [mx.array(random.integers(0, 256, (2, plane.nbytes), np.uint8)) for plane in layout.planes]
    planes = [bits.view(plane.dtype).reshape(2, *plane.shape) for bits, plane in zip(noise, layout.planes, strict=True)]
    kv.write_blocks([0, 2], *planes)
    kv.copy_blocks([(0, 1), (2, 0)])
    kv.resize(9)
    for got, bits in zip(kv.read_blocks([1, 0]), noise, strict=True):
        np.testing.assert_array_equal(np.array(got.view(mx.uint8)).reshape(2, -1), np.array(bits))


def test_quantized_layers_share_the_memory_of_layers_that_are_not(metal: None) -> None:
    own = [LayerKVCache.from_layout(BLOCKS, layout, "gather") for layout in LAYOUTS]
    expected = run_layers(own, (VIEWS[0],), TABLES[:1])
    pool = LayerKVCache.from_layout(BLOCKS, PLACE, "metal")
    shared = [pool.view(layout) for layout in LAYOUTS]
    views: Any = tuple(view._replace(ratio=4) if view.ratio == 2 else view for view in VIEWS)
    for out, wanted in zip(run_layers(shared, views, TABLES), expected, strict=True):
        np.testing.assert_allclose(np.array(out), np.array(wanted), atol=1e-5)


@pytest.mark.parametrize("kind", [INT8, Quantization(8, 64, 4, 64)], ids=str)
def test_the_self_check_passes_for_quantized_layers(metal: None, kind: Quantization) -> None:
    shape = AttentionShape(4, KVLayout(2, 64, 64, mx.float32, 16, quantization=kind))
    checks = self_check([shape])
    assert [(check.case, check.problem) for check in checks] == [
        (name, None) for name, case in CASES.items() if not case.latent
    ]


FUSED = {
    "Llama": (64, "int8", QkvKind(4, 64)),
    "Qwen 3": (128, "int4", QkvKind(4, 128, norms=True)),
    "neighbours of a part": (96, "int4", QkvKind(9, 48, traditional=True, norms=True)),
    "frequencies": (256, "int8", QkvKind(2, 256, frequencies=True)),
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_fused_layer_stores_quantized_keys_and_values(metal: None, name: str, dtype: mx.Dtype) -> None:
    """The rounding of the rotation may choose the neighbour of an element in a few places."""
    size, kind, qkv = FUSED[name]
    layout = KVLayout(2, size, size, dtype, 16, quantization=quantization_of(kind, size, size))
    shape = QkvShape(layout, qkv)
    [check] = check_fusions([shape])
    assert check.problem is None
    stored = [fused_steps(shape, each)[-2:] for each in ("metal", "gather")]
    for got, expected in zip(*stored, strict=True):
        assert float(mx.abs(expected).max()) > 1
        assert float((got == expected).mean()) > 0.98


def test_a_fused_row_is_read_once_and_no_pool_is(metal_on_cpu: Interpreter) -> None:
    layout = KVLayout(2, 64, 64, mx.float16, 16, quantization=INT8)
    fused_steps(QkvShape(layout, QkvKind(4, 64, norms=True)), "metal")
    launch = metal_on_cpu.last_launch("qkv_write_quantized")
    assert launch.loads["rows"] == 10 * 8 * 64
    assert launch.loads["key_pool"] == launch.loads["value_pool"] == launch.loads["scales"] == 0
    assert launch.store_bytes["key_pool"] == launch.store_bytes["value_pool"] == 10 * 2 * 64
