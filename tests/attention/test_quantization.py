"""Quantized pools: what they store, what attention reads of it, and that blocks move byte by byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.quantization import Quantization, quantization_of
from tests.attention.test_shared_memory import BLOCKS, TABLES, VIEWS, run_layers

INT8 = Quantization(8, 64, 8, 64)
INT4 = Quantization(8, 128, 4, 64)
TYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(params=["gather", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this backend is for a CPU")
    return str(request.param)


@pytest.mark.parametrize(
    ("dtype", "size", "expected"),
    [
        ("int8", 64, Quantization(8, 64, 8, 64)),
        ("int8", 96, Quantization(8, 32, 8, 32)),
        ("int8", 256, Quantization(8, 64, 8, 64)),
        ("int4", 64, Quantization(8, 64, 4, 64)),
        ("int4", 128, Quantization(8, 128, 4, 64)),
        ("int4", 96, Quantization(8, 32, 4, 32)),
        ("int8", 80, None),
        ("int4", 16, None),
    ],
)
def test_groups_divide_the_head(dtype: str, size: int, expected: Quantization | None) -> None:
    assert quantization_of(dtype, size, size) == expected


def test_planes_hold_packed_elements_and_scales() -> None:
    layout = KVLayout(2, 128, 128, mx.float16, 16, quantization=INT4)
    assert [(plane.name, plane.shape, plane.dtype) for plane in layout.planes] == [
        ("keys", (2, 16, 64), mx.float16),
        ("values", (2, 16, 32), mx.float16),
        ("scales", (2, 16, 6), mx.float16),
    ]
    assert layout.bytes_per_token == 2 * (128 + 64 + 12)
    assert layout.unquantized.bytes_per_token == 2 * 128 * 4


def test_groups_that_do_not_divide_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide heads of 80 and 80 elements"):
        KVLayout(2, 80, 80, mx.float16, 16, quantization=INT8)
    with pytest.raises(ValueError, match="do not divide"):
        KVLayout(1, 128, 64, mx.float16, 16, latent=True, quantization=INT8)


def step(kv: LayerKVCache, seed: int, query_lens: list[int], context_lens: list[int], exact: bool) -> mx.array:
    """exact: with the keys and values that a quantized cache gives back."""
    layout, tables = kv.layout, [[4, 1, 6], [3, 5, 0]]
    meta = AttentionMetadata.build(query_lens, context_lens, tables, layout.block_size)
    mx.random.seed(seed)
    shape = sum(query_lens), layout.num_kv_heads
    keys, values, queries = (mx.random.normal((*shape, layout.key_size)).astype(layout.dtype) for _ in range(3))
    if exact:
        keys, values = INT4.dequantize(INT4.quantize(keys, values))
    kv.write(keys, values, meta)
    return kv.attend(mx.repeat(queries, 2, axis=1), meta, scale=layout.key_size**-0.5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_is_that_of_the_dequantized_keys_and_values(dtype: mx.Dtype, backend: str) -> None:
    layout = KVLayout(2, 128, 128, dtype, 8, quantization=INT4)
    packed = LayerKVCache.from_layout(7, layout, backend)
    plain = LayerKVCache.from_layout(7, layout.unquantized, "gather")
    for seed, (query_lens, context_lens) in enumerate((([9, 15], [9, 15]), ([1, 1], [10, 16]), ([3, 1], [13, 17]))):
        got, expected = (step(kv, seed, query_lens, context_lens, kv is plain) for kv in (packed, plain))
        np.testing.assert_array_equal(np.array(got.astype(mx.float32)), np.array(expected.astype(mx.float32)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_blocks_keep_every_bit_while_they_move(dtype: mx.Dtype, backend: str) -> None:
    """Packed elements look like any number of the model's type, NaN and subnormal numbers included."""
    layout = KVLayout(2, 64, 64, dtype, 8, quantization=INT8)
    kv = LayerKVCache.from_layout(4, layout, backend)
    random = np.random.default_rng(0)
    noise = [mx.array(random.integers(0, 256, (2, plane.nbytes), np.uint8)) for plane in layout.planes]
    planes = [bits.view(plane.dtype).reshape(2, *plane.shape) for bits, plane in zip(noise, layout.planes, strict=True)]
    kv.write_blocks([0, 2], *planes)
    kv.copy_blocks([(0, 1), (2, 0)])
    kv.resize(9)
    kv.resize(3)
    for got, bits in zip(kv.read_blocks([1, 0]), noise, strict=True):
        np.testing.assert_array_equal(np.array(got.view(mx.uint8)).reshape(2, -1), np.array(bits))


LARGE = KVLayout(2, 64, 64, mx.float32, block_size=8)
PACKED = KVLayout(2, 64, 64, mx.float32, block_size=8, quantization=INT8)
PLACE = replace(PACKED, num_kv_heads=8)
LAYOUTS = (LARGE, PACKED, PACKED, LARGE)


def test_quantized_layers_share_the_memory_of_layers_that_are_not(backend: str) -> None:
    """Four blocks of 8-bit layers take the place of one in float32. Scales are in a plane of their own."""
    own = [LayerKVCache.from_layout(BLOCKS, layout, backend) for layout in LAYOUTS]
    expected = run_layers(own, (VIEWS[0],), TABLES[:1])
    pool = LayerKVCache.from_layout(BLOCKS, PLACE, backend)
    shared = [pool.view(layout) for layout in LAYOUTS]
    assert [cache.num_blocks for cache in shared] == [12, 48, 48, 12]
    views: Any = [view._replace(ratio=4) if view.ratio == 2 else view for view in VIEWS]
    for out, wanted in zip(run_layers(shared, tuple(views), TABLES), expected, strict=True):
        np.testing.assert_allclose(np.array(out), np.array(wanted), atol=1e-5)


def test_writes_of_quantized_rows_are_in_place(backend: str) -> None:
    pool = LayerKVCache.from_layout(4000, PLACE, backend)
    shared = [pool.view(layout) for layout in LAYOUTS]
    views: Any = tuple(view._replace(ratio=4) if view.ratio == 2 else view for view in VIEWS)
    run_layers(shared, views, TABLES)
    memory = mx.get_active_memory()
    mx.reset_peak_memory()
    run_layers(shared, views, TABLES)
    assert mx.get_peak_memory() - memory < pool.nbytes / 8
