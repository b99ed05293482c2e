"""Layers of several cache groups in the memory of one pool: each reads what it wrote, and nothing is copied."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import HostStep, IntArray, TableView, step_of

LARGE = KVLayout(2, 32, 16, mx.float32, block_size=8)
SMALL = KVLayout(1, 32, 16, mx.float32, block_size=8)
BLOCKS = 12

VIEWS = (TableView(0), TableView(1, 2, 0), TableView(1, 2, 1), TableView(2))
LAYOUTS = (LARGE, SMALL, SMALL, LARGE)
TABLES: IntArray = np.array([[[7, 2], [4, -1]], [[1, 3], [0, -1]], [[5, 9], [11, -1]]], np.int32)
"""Before the second step, the last group gives back block 5, which has left its window."""
WINDOWS = (None, None, 5, 3)
LENS, CONTEXTS = [2, 4], [13, 7]


@pytest.fixture(params=["gather", "cpu", "metal"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "metal":
        request.getfixturevalue("metal")
    elif request.param == "cpu" and mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this backend is for a CPU")
    return str(request.param)


def run_layers(caches: list[LayerKVCache], views: tuple[TableView, ...], tables: IntArray) -> list[mx.array]:
    """The contexts' first tokens in a step of their own, then the query tokens. A layer's keys are made of the output
    of the layer before it."""
    earlier = [context - length for length, context in zip(LENS, CONTEXTS, strict=True)]
    outputs: list[mx.array] = []
    for lens, contexts in ((earlier, earlier), (LENS, CONTEXTS)):
        held = np.where(tables == 5, -1, tables) if contexts is CONTEXTS else tables
        step = HostStep.build(step_of(lens, contexts, held), 8, views=views)
        metas, _ = step.on_device(step.upload())
        mx.random.seed(len(outputs))
        last = mx.zeros((sum(lens), 1, 1))
        for cache, meta, window in zip(caches, (metas * len(caches))[: len(caches)], WINDOWS, strict=True):
            layout = cache.layout
            keys, values, queries = (
                mx.random.normal((sum(lens), heads, size)) + last
                for heads, size in (
                    (layout.num_kv_heads, layout.key_size),
                    (layout.num_kv_heads, layout.value_size),
                    (2, layout.key_size),
                )
            )
            cache.write(keys, values, meta)
            out = cache.attend(queries, meta, scale=0.2, window=window)
            last = out.mean(axis=(1, 2), keepdims=True)
            outputs.append(out)
        mx.eval(outputs, [cache.arrays for cache in caches])
    return outputs


def test_layers_that_share_memory_compute_what_they_compute_with_their_own(backend: str) -> None:
    own = [LayerKVCache.from_layout(BLOCKS, layout, backend) for layout in LAYOUTS]
    expected = run_layers(own, (TableView(),), TABLES[:1])
    pool = LayerKVCache.from_layout(BLOCKS, LARGE, backend)
    shared = [pool.view(layout) for layout in LAYOUTS]
    assert [cache.num_blocks for cache in shared] == [12, 24, 24, 12]
    for out, wanted in zip(run_layers(shared, VIEWS, TABLES), expected, strict=True):
        np.testing.assert_allclose(np.array(out), np.array(wanted), atol=1e-5)


@pytest.mark.parametrize("backend", ["gather", "cpu"], indirect=True)
def test_layers_of_one_step_write_their_shared_memory_in_place(backend: str) -> None:
    layout = KVLayout(2, 64, 64, mx.float32, block_size=8)
    pool = LayerKVCache.from_layout(2000, layout, backend)
    shared = [
        pool.view(layout),
        *(pool.view(KVLayout(1, 64, 64, mx.float32, block_size=8)) for _ in range(2)),
        pool.view(layout),
    ]
    run_layers(shared, VIEWS, TABLES)
    before = [np.asarray(memoryview(array)).__array_interface__["data"][0] for array in pool.arrays]
    memory = mx.get_active_memory()
    mx.reset_peak_memory()
    run_layers(shared, VIEWS, TABLES)
    assert mx.get_peak_memory() - memory < pool.nbytes / 8
    assert before == [np.asarray(memoryview(array)).__array_interface__["data"][0] for array in pool.arrays]


def test_a_layer_moves_blocks_of_its_own_size(backend: str) -> None:
    pool = LayerKVCache.from_layout(BLOCKS, LARGE, backend)
    pool.write_blocks([4], *(mx.random.normal((1, *plane.shape)) for plane in LARGE.planes))
    small = pool.view(LAYOUTS[1])
    halves = [
        plane.reshape(2, *part.shape) for plane, part in zip(pool.read_blocks([4]), LAYOUTS[1].planes, strict=True)
    ]
    small.copy_blocks([(9, 1)])
    small.write_blocks([3], *(half[:1] for half in halves))
    for got, (first, second) in zip(small.read_blocks(range(10)), halves, strict=True):
        nothing = mx.zeros_like(first)
        assert mx.array_equal(got, mx.stack([nothing, second, nothing, first, *[nothing] * 4, first, second]))


def test_memory_that_is_made_anew_is_that_of_all_layers(backend: str) -> None:
    pool = LayerKVCache.from_layout(BLOCKS, LARGE, backend)
    shared = [pool.view(layout) for layout in LAYOUTS]
    run_layers(shared, VIEWS, TABLES)
    pool.clear()
    mx.eval(pool.arrays)
    assert not any(np.array(array).any() for cache in shared for array in cache.read_blocks(list(range(BLOCKS))))


def test_resized_memory_keeps_the_blocks_of_all_layers(backend: str) -> None:
    """The rest of a step reads what its beginning wrote, in a larger pool and in a smaller one."""
    own = [LayerKVCache.from_layout(BLOCKS, layout, backend) for layout in LAYOUTS]
    pool = LayerKVCache.from_layout(BLOCKS, LARGE, backend)
    shared = [pool.view(layout) for layout in LAYOUTS]
    expected, found = run_layers(own, (TableView(),), TABLES[:1]), run_layers(shared, VIEWS, TABLES)
    for num_blocks in (BLOCKS + 9, BLOCKS, 3 * BLOCKS):
        before = [np.array(array) for cache in shared for array in cache.read_blocks(list(range(BLOCKS)))]
        pool.resize(num_blocks)
        assert [cache.num_blocks for cache in shared] == [num_blocks, 2 * num_blocks, 2 * num_blocks, num_blocks]
        after = [np.array(array) for cache in shared for array in cache.read_blocks(list(range(BLOCKS)))]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)
        found = run_layers(shared, VIEWS, TABLES)
    for out, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(out), np.array(wanted), atol=1e-5)
    with pytest.raises(ValueError, match="num_blocks must be positive, got 0"):
        pool.resize(0)


def test_a_smaller_pool_gives_its_memory_back(backend: str) -> None:
    pool = LayerKVCache.from_layout(4000, LARGE, backend)
    mx.eval(pool.arrays)
    before, large = mx.get_active_memory(), pool.nbytes
    pool.resize(400)
    assert before - mx.get_active_memory() > 0.8 * large


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(3, 32, 16, mx.float32, block_size=8),
        KVLayout(1, 32, 32, mx.float32, block_size=8),
        KVLayout(2, 32, 16, mx.float16, block_size=8),
        KVLayout(2, 32, 16, mx.float32, block_size=16),
        KVLayout(1, 32, 16, mx.float32, block_size=16),
        KVLayout(4, 32, 16, mx.float32, block_size=8),
    ],
    ids=str,
)
def test_layers_whose_blocks_do_not_fill_a_block_are_refused(layout: KVLayout) -> None:
    with pytest.raises(ValueError, match="does not consist of blocks of"):
        LayerKVCache.from_layout(BLOCKS, LARGE, "gather").view(layout)
