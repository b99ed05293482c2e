"""What the cache of a layer keeps and refuses, whole blocks of it, and the memory that a step takes. On both
backends of MLX's own operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache, resolve_backend
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from tests.attention.backends import backend
from tests.attention.scenes import (
    RAGGED,
    Array,
    Scene,
    Shape,
    make_cache,
)

__all__ = ["backend"]


def filled(num_blocks: int = 6, seed: int = 0) -> tuple[LayerKVCache, Array, Array]:
    kv = make_cache(num_blocks, 2, 16, mx.float32, block_size=8)
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, num_blocks, 2, 8, 16)).astype(np.float32)
    kv.write_blocks(list(range(num_blocks)), mx.array(keys), mx.array(values))
    return kv, keys, values


def contents(kv: LayerKVCache) -> tuple[Any, Any]:
    keys, values = kv.read_blocks(list(range(kv.num_blocks)))
    return np.array(keys), np.array(values)


def test_blocks_come_back_as_they_were_written() -> None:
    kv, keys, values = filled()
    for got, plane in zip(kv.read_blocks([4, 0, 4]), (keys, values), strict=True):
        np.testing.assert_array_equal(np.array(got), plane[[4, 0, 4]])


def test_written_tokens_lie_at_head_and_slot_of_their_block() -> None:
    kv = make_cache(3, 2, 16, mx.float32, block_size=8)
    meta = AttentionMetadata.build([9], [9], [[2, 0]], block_size=8)
    keys = mx.random.normal((9, 2, 16), key=mx.random.key(0))
    kv.write(keys, -keys, meta)
    got_keys, got_values = kv.read_blocks([2, 0])
    assert mx.array_equal(got_keys[0], keys[:8].swapaxes(0, 1))
    assert mx.array_equal(got_keys[1, :, 0], keys[8])
    assert mx.array_equal(got_values, -got_keys)
    assert not np.array(kv.read_blocks([1])[0]).any()


def test_copies_all_read_the_pool_as_it_was_before() -> None:
    kv, keys, values = filled()
    kv.copy_blocks([(0, 1), (1, 2), (2, 0), (1, 5)])
    got_keys, got_values = contents(kv)
    np.testing.assert_array_equal(got_keys, keys[[2, 0, 1, 3, 4, 1]])
    np.testing.assert_array_equal(got_values, values[[2, 0, 1, 3, 4, 1]])


def test_no_copies_and_no_blocks_change_nothing() -> None:
    kv, keys, _ = filled()
    kv.copy_blocks([])
    nothing = kv.read_blocks([])
    assert [array.shape for array in nothing] == [(0, 2, 8, 16)] * 2
    kv.write_blocks([], *nothing)
    np.testing.assert_array_equal(contents(kv)[0], keys)


def test_a_read_keeps_its_values_when_the_block_is_overwritten() -> None:
    kv, keys, _ = filled()
    before, _ = kv.read_blocks([3])
    zero = mx.zeros((1, 2, 8, 16))
    kv.write_blocks([3], zero, zero)
    mx.eval(kv.arrays)
    np.testing.assert_array_equal(np.array(before), keys[[3]])


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 1)], [(0, 6)], [(6, 0)], [(-1, 0)], [(0, -1)]])
def test_copies_to_one_block_twice_or_out_of_range_are_refused(pairs: list[tuple[int, int]]) -> None:
    kv, keys, _ = filled()
    with pytest.raises(ValueError, match=r"written twice|out of range"):
        kv.copy_blocks(pairs)
    np.testing.assert_array_equal(contents(kv)[0], keys)


@pytest.mark.parametrize("ids", [[6], [-1], [0, 99]])
def test_block_ids_out_of_range_are_refused_by_read_and_write(ids: list[int]) -> None:
    kv, _, _ = filled()
    with pytest.raises(ValueError, match="out of range: the pool has 6 blocks"):
        kv.read_blocks(ids)
    data = mx.zeros((len(ids), 2, 8, 16))
    with pytest.raises(ValueError, match="out of range: the pool has 6 blocks"):
        kv.write_blocks(ids, data, data)


def test_write_blocks_refuses_other_shapes_and_types() -> None:
    kv, _, _ = filled()
    good = mx.zeros((1, 2, 8, 16))
    for bad in (mx.zeros((1, 2, 16, 8)), mx.zeros((2, 2, 8, 16)), mx.zeros((2, 8, 16))):
        for planes in ((bad, good), (good, bad), (good,), (good, good, good)):
            with pytest.raises(ValueError, match=r"layout have {'keys': \(\(1, 2, 8, 16\), .*'values': \(\(1, "):
                kv.write_blocks([0], *planes)
    with pytest.raises(ValueError, match=r"got .*float16"):
        kv.write_blocks([0], good, good.astype(mx.float16))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be positive, got -1"),
        ({"head_dim": 0}, "head_dim must be positive, got 0"),
        ({"block_size": 24}, "power of two, got 24"),
        ({"block_size": 0}, "power of two, got 0"),
        ({"dtype": mx.int8}, "got mlx.core.int8"),
        ({"backend": "metal"}, "'metal' is not available"),
        ({"backend": "cuda"}, "must be one of auto, metal, gather, cpu, got 'cuda'"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_blocks": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": mx.float32} | changed
    with pytest.raises(ValueError, match=message):
        LayerKVCache(**arguments)


def test_auto_is_cpu_on_a_cpu_and_gather_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, name in ((mx.Device(mx.cpu), "cpu"), (mx.Device(mx.gpu), "gather")):
        monkeypatch.setattr(mx, "default_device", lambda device=device: device)
        assert resolve_backend("auto") == name
        assert resolve_backend("gather") == "gather"
        assert LayerKVCache(1, 1, 8, mx.float32, backend="gather").backend == "gather"


def test_the_cpu_backend_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    with pytest.raises(ValueError, match="'cpu' is not available: MLX runs on a GPU here"):
        resolve_backend("cpu")


def test_a_layout_knows_its_bytes_and_makes_a_cache(backend: str) -> None:
    layout = KVLayout(num_kv_heads=2, key_size=16, value_size=16, dtype=mx.float16, block_size=8)
    assert (layout.bytes_per_token, layout.bytes_per_block) == (128, 1024)
    kv = LayerKVCache.from_layout(5, layout, backend)
    assert (kv.num_blocks, kv.backend, kv.layout) == (5, backend, layout)
    assert kv.nbytes == 5 * layout.bytes_per_block
    assert LayerKVCache(5, 2, 16, mx.float16, 8, backend).layout == layout


def test_a_latent_layout_stores_its_row_once(backend: str) -> None:
    layout = KVLayout(num_kv_heads=1, key_size=24, value_size=16, dtype=mx.float16, block_size=8, latent=True)
    assert layout.bytes_per_token == 24 * 2
    assert [plane.nbytes for plane in layout.planes] == [layout.bytes_per_block] == [8 * 24 * 2]
    kv = LayerKVCache.from_layout(5, layout, backend)
    assert kv.layout == layout != replace(layout, latent=False)
    assert kv.nbytes == sum(array.nbytes for array in kv.arrays) == 5 * layout.bytes_per_block


def test_whole_blocks_of_a_latent_layout_have_one_plane(backend: str) -> None:
    kv = LayerKVCache.from_layout(4, KVLayout(1, 24, 16, mx.float32, 8, latent=True), backend)
    rows = mx.random.normal((2, 1, 8, 24), key=mx.random.key(0))
    kv.write_blocks([3, 1], rows)
    kv.copy_blocks([(3, 0)])
    [keys] = kv.read_blocks([1, 0, 2])
    assert mx.array_equal(keys, mx.stack([rows[1], rows[0], mx.zeros_like(rows[0])]))
    with pytest.raises(ValueError, match=r"layout have {'keys': \(\(1, 1, 8, 24\), mlx.core.float32\)}, got"):
        kv.write_blocks([0], rows[:1], rows[:1, ..., :16])


def test_a_latent_layout_takes_rows_and_queries_in_two_parts_and_others_do_not(backend: str) -> None:
    meta = AttentionMetadata.build([1], [1], [[0]])
    rows = mx.zeros((1, 1, 24))
    plain = LayerKVCache(1, 1, 24, mx.float32, backend=backend)
    latent = LayerKVCache(1, 1, 24, mx.float32, backend=backend, value_size=16, latent=True)
    latents, pe = rows[..., :16], rows[..., 16:]
    with pytest.raises(ValueError, match=r"latents must have shape \(1, 1, 16\)"):
        latent.write(rows, pe, meta)
    with pytest.raises(ValueError, match=r"k_pe must have shape \(1, 1, 8\)"):
        latent.write(latents, rows, meta)
    with pytest.raises(ValueError, match=r"queries must have shape \(1, heads, 16\)"):
        latent.attend(rows, meta, scale=1.0, q_pe=pe)
    for q_pe in (None, rows, pe.astype(mx.float16)):
        with pytest.raises(ValueError, match=r"q_pe must be \(\(1, 1, 8\), mlx.core.float32\), got"):
            latent.attend(latents, meta, scale=1.0, q_pe=q_pe)
    with pytest.raises(ValueError, match="q_pe must be None, got"):
        plain.attend(rows, meta, scale=1.0, q_pe=pe)


def one_sequence(**changed: Any) -> tuple[LayerKVCache, AttentionMetadata]:
    kv = make_cache(4, 2, 16, mx.float32)
    arguments: dict[str, Any] = {"query_lens": [3], "context_lens": [3], "block_tables": [[0]]} | changed
    return kv, AttentionMetadata.build(**arguments)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (mx.zeros((2, 2, 16)), r"must have shape \(3, 2, 16\), got \(2, 2, 16\)"),
        (mx.zeros((3, 4, 16)), r"must have shape \(3, 2, 16\), got \(3, 4, 16\)"),
        (mx.zeros((3, 2, 8)), r"must have shape \(3, 2, 16\), got \(3, 2, 8\)"),
        (mx.zeros((3, 2, 16), mx.float16), "must be mlx.core.float32.* got mlx.core.float16"),
    ],
    ids=str,
)
def test_keys_and_values_that_do_not_fit_are_refused(keys: mx.array, message: str) -> None:
    kv, meta = one_sequence()
    good = mx.zeros((3, 2, 16))
    with pytest.raises(ValueError, match="keys " + message):
        kv.write(keys, good, meta)
    with pytest.raises(ValueError, match="values " + message):
        kv.write(good, keys, meta)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (mx.zeros((2, 4, 16)), r"queries must have shape \(3, heads, 16\)"),
        (mx.zeros((3, 4, 32)), r"queries must have shape \(3, heads, 16\)"),
        (mx.zeros((3, 4, 1, 16)), r"queries must have shape"),
        (mx.zeros((3, 3, 16)), "3 query heads are not a multiple of the 2 KV heads"),
        (mx.zeros((3, 0, 16)), "0 query heads"),
        (mx.zeros((3, 4, 16), mx.bfloat16), "queries must be mlx.core.float32"),
    ],
    ids=str,
)
def test_queries_that_do_not_fit_are_refused(queries: mx.array, message: str) -> None:
    kv, meta = one_sequence()
    with pytest.raises(ValueError, match=message):
        kv.attend(queries, meta, scale=1.0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"chunk": -1}, "chunk must be a positive integer, got -1"),
        ({"window": 8, "chunk": 9}, "window and chunk exclude each other, got 8 and 9"),
        ({"softcap": 0.0}, "softcap must be positive, got 0"),
        ({"sinks": mx.zeros((2,))}, r"sinks must have shape \(4,\), got \(2,\)"),
    ],
    ids=["window", "chunk", "both", "softcap", "sinks"],
)
def test_options_out_of_range_are_refused(option: dict[str, Any], message: str) -> None:
    kv, meta = one_sequence()
    with pytest.raises(ValueError, match=message):
        kv.attend(mx.zeros((3, 4, 16)), meta, scale=1.0, **option)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_tables": [[4]]}, "block id 4 is out of range: the pool has 4 blocks"),
        ({"block_tables": [[0, 4]]}, "block id 4 is out of range"),
        ({"block_size": 16}, "blocks of 16 tokens, but the pool's have 32"),
    ],
    ids=str,
)
def test_metadata_of_another_pool_is_refused(changed: dict[str, Any], message: str) -> None:
    kv, meta = one_sequence(**changed)
    data = mx.zeros((3, 2, 16))
    with pytest.raises(ValueError, match=message):
        kv.write(data, data, meta)
    with pytest.raises(ValueError, match=message):
        kv.attend(data, meta, scale=1.0)


def addresses(kv: LayerKVCache) -> list[int]:
    mx.eval(kv.arrays)
    return [np.asarray(memoryview(array)).__array_interface__["data"][0] for array in kv.arrays]  # type: ignore[arg-type]


def one_step(kv: LayerKVCache, position: int) -> None:
    meta = AttentionMetadata.build([1], [position + 1], [list(range(position // 32 + 1))])
    data = mx.full((1, kv.layout.num_kv_heads, kv.layout.key_size), float(position))
    kv.write(data, data, meta)
    out = kv.attend(mx.zeros((1, kv.layout.num_kv_heads, kv.layout.key_size)), meta, scale=1.0)
    mx.eval(out, kv.arrays)


@pytest.mark.parametrize("num_blocks", [64, 1024])
def test_a_step_writes_in_place_whatever_the_size_of_the_pool(num_blocks: int) -> None:
    kv = make_cache(num_blocks, 2, 64, mx.float32)
    one_step(kv, 0)
    before, memory = addresses(kv), mx.get_active_memory()
    mx.reset_peak_memory()
    for position in range(1, 5):
        one_step(kv, position)
    assert mx.get_peak_memory() - memory < 500_000 < kv.nbytes
    assert addresses(kv) == before


def test_blocks_are_copied_and_written_in_place() -> None:
    kv = make_cache(512, 2, 64, mx.float32)
    data = mx.ones((1, 2, 32, 64))
    mx.eval(data)
    before, memory = addresses(kv), mx.get_active_memory()
    mx.reset_peak_memory()
    kv.copy_blocks([(0, 1), (1, 2)])
    kv.write_blocks([3], data, data)
    mx.eval(kv.arrays)
    assert mx.get_peak_memory() - memory < 500_000 < kv.nbytes
    assert addresses(kv) == before


def test_a_view_of_the_pool_keeps_its_values_at_the_price_of_a_copy() -> None:
    """`arrays` themselves are the pools and change with every write; a view that is still held stops that in place."""
    kv = make_cache(64, 2, 64, mx.float32)
    one_step(kv, 0)
    before = addresses(kv)
    view = kv.arrays[0].reshape(64, 2, 32, 64)
    mx.eval(view)
    one_step(kv, 1)
    assert addresses(kv)[0] != before[0]
    assert addresses(kv)[1] == before[1]
    assert not np.array(view[0, :, 1]).any()
    assert np.array(kv.read_blocks([0])[0][0, :, 1] == 1).all()


def test_a_cleared_pool_is_zero_and_serves_again() -> None:
    scene = Scene(replace(Shape(), block_size=8), RAGGED)
    scene.kv.clear()
    assert not np.array(scene.kv.read_blocks(list(range(scene.kv.num_blocks)))[0]).any()
    scene.write_all()
    scene.check()
