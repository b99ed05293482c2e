"""The gather and the "cpu" backend of LayerKVCache against attention written out in float64 NumPy, over block tables in
random order."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import gather
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.pool import Locality, Options
from tests.attention.backends import backend
from tests.attention.scenes import (
    RAGGED,
    TOLERANCE,
    Extras,
    Scene,
    Shape,
    attend,
    fill_blocks,
    make_cache,
    reference_attention,
    share,
    write,
)

__all__ = ["backend"]

LENGTHS = (1, 31, 32, 33, 511, 512, 513, 1500)


@pytest.mark.parametrize("context", LENGTHS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_decode_and_chunk_at_every_length_match_float64(dtype: mx.Dtype, context: int) -> None:
    Scene(Shape(dtype=dtype), [(1, context), (min(context, 37), context)]).check()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["mha", "gqa-4", "mqa"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_head_sizes_and_groups_match_float64(dtype: mx.Dtype, heads: tuple[int, int], head_dim: int) -> None:
    Scene(Shape(heads[0], heads[1], head_dim, dtype=dtype), RAGGED).check()


LAYOUTS = {
    "values smaller than keys": Shape(8, 2, 48, value_size=32),
    "values larger than keys": Shape(3, 3, 16, value_size=40, block_size=8),
    "latent": Shape(20, 1, 72, value_size=64, latent=True),
    "DeepSeek-V3": Shape(16, 1, 576, value_size=512, latent=True),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_of_their_own_size_and_latents_match_float64(layout: str, dtype: mx.Dtype) -> None:
    scene = Scene(replace(LAYOUTS[layout], dtype=dtype), RAGGED)
    for extras in (Extras(), Extras(window=33), Extras(softcap=2.0), Extras(sinks=True)):
        scene.check(extras)


@pytest.mark.parametrize("shape", [LAYOUTS["latent"], LAYOUTS["values larger than keys"]], ids=["latent", "larger"])
def test_a_prefix_shared_by_sequences_of_other_layouts_matches_float64(shape: Shape) -> None:
    scene = Scene(replace(shape, block_size=8), [(1, 200 + i) for i in range(6)] + [(9, 150)])
    for i in range(1, 7):
        share(scene, i, 0, 15)
    scene.write_all()
    scene.check()


def test_queries_of_large_heads_in_tiles_match_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 64 heads and 99 keys: 3 tokens each."""
    monkeypatch.setattr(gather, "MAX_SCORES", 64 * 99 * 3)
    for shape in (Shape(64, 1, 24, value_size=16, latent=True), Shape(64, 2, 260)):
        scene = Scene(shape, [(10, 99), (1, 99)])
        for extras in (Extras(), Extras(window=33), Extras(softcap=2.0), Extras(sinks=True)):
            scene.check(extras)


@pytest.mark.parametrize(
    ("size", "softcap", "forced", "calls"),
    [(128, None, False, 1), (256, None, True, 1), (192, None, True, 1), (112, None, False, 4), (256, 2.0, False, 0)],
)
def test_scores_that_take_much_memory_are_fused_or_computed_in_tiles(
    monkeypatch: pytest.MonkeyPatch, size: int, softcap: float | None, forced: bool, calls: int
) -> None:
    """As on a GPU: the CPU has no fused kernel."""
    seen: list[bool] = []
    attend, queries = mx.fast.scaled_dot_product_attention, mx.random.normal((1, 2, 10, size))
    keys = mx.random.normal((1, 2, 40, size))

    def watched(*args: Any, force_fused: bool = False, **options: Any) -> mx.array:
        seen.append(force_fused)
        return attend(*args, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    options = Options(0.1, Locality(), softcap, None)
    expected = gather.contiguous_attention(queries, keys, keys, "causal", options)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(gather, "MAX_SCORES", 2 * 40 * 3 * (gather.SOFTCAP_ARRAYS if softcap else 1))
    seen.clear()
    found = gather.contiguous_attention(queries, keys, keys, "causal", options)
    assert seen == [forced] * calls
    assert mx.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 31, 32, 33, 100, 5000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_window_softcap_and_sinks_match_float64(
    sinks: bool, softcap: float | None, window: int | None, block_size: int
) -> None:
    Scene(Shape(block_size=block_size), RAGGED).check(Extras(window, softcap, sinks))


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("chunk", [1, 7, 8, 32, 33, 64, 5000])
@pytest.mark.parametrize("extras", [Extras(), Extras(softcap=2.0, sinks=True)], ids=["plain", "extras"])
def test_local_chunks_match_float64(extras: Extras, chunk: int, block_size: int) -> None:
    lens = [*RAGGED, (150, 150), (130, 200)]
    Scene(Shape(block_size=block_size), lens).check(replace(extras, chunk=chunk))


IMAGES = {2: [(1, 4)], 4: [(31, 40), (50, 71)], 6: [(10, 34)], 9: [(0, 33)], 10: [(32, 72)]}
"""Of RAGGED and two more: in the middle and at the ends of chunks, begun before them, and of several tiles."""


@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize("extras", [Extras(), Extras(softcap=2.0, sinks=True)], ids=["plain", "extras"])
def test_images_whose_tokens_see_one_another_match_float64(extras: Extras, window: int | None, block_size: int) -> None:
    scene = Scene(Shape(block_size=block_size), [*RAGGED, (150, 150), (130, 200)])
    causal = replace(extras, window=window)
    seeing = replace(causal, spans=IMAGES)
    scene.check(seeing)
    assert np.abs(scene.attend(seeing) - scene.expected(causal)).max() > 0.1, "the test proves little"
    assert np.array_equal(scene.attend(causal, scene.meta(IMAGES)), scene.attend(causal)), "a layer without them"


def test_local_chunks_of_sequences_with_one_prefix_and_of_latents_match_float64() -> None:
    scene = Scene(Shape(block_size=8), [(1, 200 + i) for i in range(6)])
    for i in range(1, 6):
        share(scene, i, 0, 20)
    scene.write_all()
    scene.check(Extras(chunk=64))
    Scene(LAYOUTS["latent"], RAGGED).check(Extras(chunk=40))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_window_softcap_and_sinks_match_float64_in_half_types(dtype: mx.Dtype) -> None:
    scene = Scene(Shape(8, 2, 64, dtype=dtype), RAGGED)
    for window, softcap, sinks in itertools.product((None, 33), (None, 2.0), (False, True)):
        scene.check(Extras(window, softcap, sinks))


@pytest.mark.parametrize("seed", range(12))
def test_random_ragged_batches_match_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lens = []
    for _ in range(int(rng.integers(1, 24))):
        context = int(rng.integers(1, 200))
        lens.append((1 if rng.random() < 0.6 else int(rng.integers(1, context + 1)), context))
    window = None if seed % 3 == 0 else int(rng.integers(1, 120))
    shape = Shape(block_size=(8, 16, 32)[seed % 3 - 1])
    Scene(shape, lens, seed).check(Extras(window, 3.0 if seed % 4 == 0 else None, seed % 2 == 0))


def test_sixty_four_decoding_sequences_match_float64() -> None:
    Scene(Shape(block_size=8), [(1, context) for context in range(1, 65)]).check(Extras(window=13))


@pytest.mark.parametrize("extras", [Extras(), Extras(window=40), Extras(softcap=5.0), Extras(sinks=True)], ids=str)
def test_large_scores_stay_finite_and_exact(extras: Extras) -> None:
    scene = Scene(Shape(), [(1, 70), (20, 70)])
    scene.scale = 100.0
    assert np.abs(scene.attend(extras) - scene.expected(extras)).max() < 1e-3


def test_half_type_scores_are_as_exact_for_decoding_as_for_a_chunk() -> None:
    """Scores of some ten, as real models have: float16 alone would round them by 0.01."""
    shape = Shape(head_dim=64, dtype=mx.float16)
    scene = Scene(shape, [(1, 300), (2, 300)])
    scene.scale = 1.5
    scene.keys[1], scene.values[1] = scene.keys[0], scene.values[0]
    scene.queries[1][1] = scene.queries[0][0]
    scene.write_all()
    out, expected = scene.attend(), scene.expected()
    error_decode = np.abs(out[0] - expected[0]).max()
    error_chunk = np.abs(out[2] - expected[2]).max()
    assert error_decode < max(4 * error_chunk, TOLERANCE[mx.float16])


def test_foreign_unused_and_stale_rows_never_reach_the_output() -> None:
    """The pool is NaN outside the contexts; here every block that is not the sequence's own becomes NaN as well."""
    every = (Extras(), Extras(window=20), Extras(chunk=20), Extras(softcap=2.0), Extras(sinks=True))
    latent = Shape(4, 1, 24, value_size=16, latent=True)
    for extras, shape in itertools.product(every, (Shape(), latent)):
        scene = Scene(shape, RAGGED)
        expected = scene.attend(extras)
        assert np.isfinite(expected).all()
        starts = np.concatenate([[0], np.cumsum(scene.query_lens)])
        for i in range(0, len(RAGGED), 3):
            foreign = [block for j, table in enumerate(scene.tables) if j != i for block in table] + scene.spare
            fill_blocks(scene.kv, foreign)
            got = scene.attend(extras)[starts[i] : starts[i + 1]]
            np.testing.assert_allclose(got, expected[starts[i] : starts[i + 1]], atol=1e-6)
            scene.write_all()


@pytest.mark.parametrize("latent", [False, True])
def test_values_that_an_earlier_owner_left_in_a_block_do_not_show(latent: bool, backend: str) -> None:
    """NaN among the values after a context: of a prompt, of a chunk that ends in a new block, of a decoded token that
    begins one, and while it fills up."""
    layout = KVLayout(1, 16, 12, mx.float32, 32, latent=True) if latent else KVLayout(2, 16, 16, mx.float32, 32)
    heads = layout.num_kv_heads
    kv = LayerKVCache.from_layout(4, layout, backend)
    fill_blocks(kv, range(4))
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.normal(size=(101, heads, 16)).astype(np.float32)) for _ in range(2))
    if latent:
        values = keys[..., :12]
    end = 0
    for query_len in (20, 50, 26, 1, 1, 1, 1, 1):
        begin, end = end, end + query_len
        meta = AttentionMetadata.build([query_len], [end], [[2, 0, 3, 1]])
        write(kv, keys[begin:end], values[begin:end], meta)
        query = mx.array(rng.normal(size=(1, 4, 16)).astype(np.float32))
        out = attend(kv, query, AttentionMetadata.build([1], [end], [[2, 0, 3, 1]]), scale=0.25)
        q, k, v = (np.array(array, dtype=np.float64) for array in (query, keys[:end], values[:end]))
        expected = reference_attention(q, k, v, 0.25, Extras(), None)
        np.testing.assert_allclose(np.array(out), expected, atol=1e-5)


def test_blocks_reserved_after_the_context_are_not_read() -> None:
    scene = Scene(Shape(), RAGGED, spare_blocks=20)
    expected = scene.attend()
    scene.tables = [[*table, scene.spare[2 * i], scene.spare[2 * i + 1]] for i, table in enumerate(scene.tables)]
    np.testing.assert_allclose(scene.attend(), expected, atol=1e-6)


def test_order_of_sequences_only_permutes_the_output() -> None:
    scene = Scene(Shape(), RAGGED)
    starts = np.concatenate([[0], np.cumsum(scene.query_lens)])
    before = scene.attend(Extras(window=50))
    order = np.random.default_rng(3).permutation(len(RAGGED)).tolist()
    for name in ("query_lens", "context_lens", "tables", "queries"):
        setattr(scene, name, [getattr(scene, name)[i] for i in order])
    expected = np.concatenate([before[starts[i] : starts[i + 1]] for i in order])
    np.testing.assert_allclose(scene.attend(Extras(window=50)), expected, atol=1e-6)


def test_sequences_may_share_blocks() -> None:
    scene = Scene(Shape(), [(1, 50), (3, 50)])
    scene.tables[1] = scene.tables[0]
    scene.keys[1], scene.values[1] = scene.keys[0], scene.values[0]
    scene.check()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_many_large_values_do_not_pass_what_a_half_type_holds(dtype: mx.Dtype) -> None:
    """Equal scores: their weights are all 1, and add up to more than 65,504 before they are divided by their sum."""
    scene = Scene(Shape(dtype=dtype), [(1, 3000), (1, 3000), (9, 3000)])
    for i in range(3):
        scene.keys[i], scene.values[i] = 0 * scene.keys[i], 0 * scene.values[i] + 40.0
    for i in (1, 2):
        share(scene, i, 0, 93)
    scene.write_all()
    assert np.abs(scene.attend() - 40.0).max() < 0.5


def test_a_block_of_large_values_does_not_pass_what_a_half_type_holds() -> None:
    """32 times 30,000."""
    scene = Scene(Shape(dtype=mx.float16), [(1, 64), (9, 64)])
    for i in range(2):
        scene.keys[i], scene.values[i] = 0 * scene.keys[i], 0 * scene.values[i] + 30_000.0
    scene.write_all()
    assert np.abs(scene.attend() - 30_000.0).max() < 64


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("extras", [Extras(), Extras(window=300), Extras(sinks=True), Extras(softcap=2.0)], ids=str)
def test_one_long_context_beside_short_ones_matches_float64(extras: Extras, dtype: mx.Dtype) -> None:
    scene = Scene(Shape(block_size=8, dtype=dtype), [(1, 20 + i) for i in range(9)] + [(1, 700)] + [(1, 15), (1, 700)])
    share(scene, 11, 9, 30)
    scene.write_all()
    scene.check(extras)


@pytest.mark.parametrize("seed", range(16))
def test_random_trees_of_shared_blocks_match_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = (8, 16, 32)[seed % 3]
    lens = [(1 if rng.random() < 0.8 else 3, int(rng.integers(2 * size, 24 * size))) for _ in range(20)]
    lens += [(1, 24 * size), (1, 24 * size)]
    scene = Scene(Shape(block_size=size, dtype=mx.float16 if seed % 5 == 4 else mx.float32), lens, seed)
    share(scene, 21, 20, 20)
    for i in range(1, 20):
        other = int(rng.integers(0, i))
        longest = min((scene.context_lens[j] - 3) // size for j in (i, other))
        share(scene, i, other, int(rng.integers(0, longest + 1)))
    scene.write_all()
    window = None if seed % 2 else int(rng.integers(size, 12 * size))
    scene.check(Extras(window, 3.0 if seed % 4 == 0 else None, seed % 3 == 0))


def test_one_metadata_serves_layers_of_different_windows_and_shapes() -> None:
    a, b = Scene(Shape(), RAGGED), Scene(Shape(num_kv_heads=1, head_dim=32), RAGGED)
    assert a.tables == b.tables
    meta = a.meta()
    every = (a, Extras()), (b, Extras(window=9)), (a, Extras(window=9)), (b, Extras()), (a, Extras(chunk=9))
    for scene, extras in every:
        assert np.abs(scene.attend(extras, meta) - scene.expected(extras)).max() < 1e-5


@pytest.mark.parametrize("fewer_first", [True, False])
def test_one_metadata_serves_pools_of_different_sizes(fewer_first: bool) -> None:
    """What shorter sequences are padded with must be the pool's own, not that of the pool that came first."""
    lens = [(1, 70), (1, 100), (1, 128)]
    small, large = Scene(Shape(), lens, spare_blocks=0), Scene(Shape(), lens, spare_blocks=0)
    grown = make_cache(small.kv.num_blocks + 8, 2, 16, mx.float32)
    fill_blocks(grown, range(grown.num_blocks))
    large.kv = grown
    large.write_all()
    meta = small.meta()
    for scene in (small, large) if fewer_first else (large, small):
        assert np.abs(scene.attend(meta=meta) - scene.expected()).max() < 1e-5


def test_sinks_may_stay_in_float32_beside_a_half_type_pool() -> None:
    """For decoding as for chunks; a model may keep this small vector in full precision."""
    for lens in ([(1, 40)], [(5, 40)]):
        scene = Scene(Shape(dtype=mx.bfloat16), lens)
        out = scene.kv.attend(
            scene.array(scene.queries),
            scene.meta(),
            scale=scene.scale,
            sinks=mx.array(scene.sinks.astype(np.float32)),
        )
        assert out.dtype == mx.bfloat16
        got = np.array(out.astype(mx.float32), dtype=np.float64)
        assert np.abs(got - scene.expected(Extras(sinks=True))).max() < TOLERANCE[mx.bfloat16]


# -- whole blocks ------------------------------------------------------------------------------------------------------


# -- memory ------------------------------------------------------------------------------------------------------------
