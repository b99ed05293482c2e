"""LayerKVCache against attention written out in float64 NumPy, over block tables in random order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxpaged.attention import AttentionMetadata, LayerKVCache, gather, lanes, powers, resolve_backend
from mlxpaged.attention.gather_plan import TILE, PromptChunk, make_plan

Array = npt.NDArray[np.float64]

LENGTHS = (1, 31, 32, 33, 511, 512, 513, 1500)

TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
"""Largest difference from float64, of outputs whose size is up to about 3; inputs are rounded to the type first."""


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 32
    dtype: mx.Dtype = mx.float32


@dataclass(frozen=True)
class Extras:
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def rounded(array: Array, dtype: mx.Dtype) -> Array:
    return np.array(mx.array(array.astype(np.float32)).astype(dtype).astype(mx.float32), dtype=np.float64)


def reference_attention(
    queries: Array, keys: Array, values: Array, scale: float, extras: Extras, sinks: Array | None
) -> Array:
    """Query j of n, [n, Hq, D], sits at position len(keys) - n + j; keys and values are [context, Hkv, D]."""
    n, num_heads, _ = queries.shape
    context, num_kv_heads, _ = keys.shape
    out = np.zeros_like(queries)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = queries[:, head] @ keys[:, kv_head].T * scale
        if extras.softcap is not None:
            scores = extras.softcap * np.tanh(scores / extras.softcap)
        query_at, key_at = np.arange(context - n, context)[:, None], np.arange(context)
        hidden = key_at > query_at
        if extras.window is not None:
            hidden |= key_at <= query_at - extras.window
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((n, 1), sinks[head])], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head] = weights[:, :context] @ values[:, kv_head]
    return out


class Scene:
    """Sequences of (query_len, context_len) in a pool that is NaN wherever no token was written."""

    def __init__(self, shape: Shape, lens: Sequence[tuple[int, int]], seed: int = 0, spare_blocks: int = 2) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.query_lens = [query for query, _ in lens]
        self.context_lens = [context for _, context in lens]
        counts = [-(-context // shape.block_size) for context in self.context_lens]
        ids = self.rng.permutation(sum(counts) + spare_blocks).tolist()
        ends = list(itertools.accumulate(counts))
        self.tables = [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]
        self.spare = ids[ends[-1] :]
        self.kv = LayerKVCache(len(ids), shape.num_kv_heads, shape.head_dim, shape.dtype, shape.block_size)
        everything = list(range(len(ids)))
        nan = mx.full((len(ids), shape.num_kv_heads, shape.block_size, shape.head_dim), mx.nan, shape.dtype)
        self.kv.write_blocks(everything, nan, nan)
        self.keys = [self.random(context, shape.num_kv_heads) for context in self.context_lens]
        self.values = [self.random(context, shape.num_kv_heads) for context in self.context_lens]
        self.queries = [self.random(query, shape.num_heads) for query in self.query_lens]
        self.scale = shape.head_dim**-0.5
        self.sinks = rounded(self.rng.normal(size=shape.num_heads), shape.dtype)
        self.write_all()

    def random(self, length: int, heads: int) -> Array:
        return rounded(self.rng.normal(size=(length, heads, self.shape.head_dim)), self.shape.dtype)

    def array(self, parts: Sequence[Array]) -> mx.array:
        return mx.array(np.concatenate(parts).astype(np.float32)).astype(self.shape.dtype)

    def write_all(self) -> None:
        """Earlier tokens in a step of their own, then the step's query tokens, as the engine does."""
        earlier = [context - query for query, context in zip(self.query_lens, self.context_lens, strict=True)]
        some = [i for i, length in enumerate(earlier) if length]
        if some:
            lens = [earlier[i] for i in some]
            meta = AttentionMetadata.build(lens, lens, [self.tables[i] for i in some], self.shape.block_size)
            self.kv.write(
                self.array([self.keys[i][: earlier[i]] for i in some]),
                self.array([self.values[i][: earlier[i]] for i in some]),
                meta,
            )
        self.kv.write(
            self.array([keys[start:] for keys, start in zip(self.keys, earlier, strict=True)]),
            self.array([values[start:] for values, start in zip(self.values, earlier, strict=True)]),
            self.meta(),
        )

    def meta(self) -> AttentionMetadata:
        return AttentionMetadata.build(self.query_lens, self.context_lens, self.tables, self.shape.block_size)

    def attend(self, extras: Extras = Extras(), meta: AttentionMetadata | None = None) -> Array:
        out = self.kv.attend(
            self.array(self.queries),
            meta or self.meta(),
            scale=self.scale,
            window=extras.window,
            softcap=extras.softcap,
            sinks=mx.array(self.sinks.astype(np.float32)).astype(self.shape.dtype) if extras.sinks else None,
        )
        assert out.shape == (sum(self.query_lens), self.shape.num_heads, self.shape.head_dim)
        assert out.dtype == self.shape.dtype
        return np.array(out.astype(mx.float32), dtype=np.float64)

    def expected(self, extras: Extras = Extras()) -> Array:
        sinks = self.sinks if extras.sinks else None
        parts = zip(self.queries, self.keys, self.values, strict=True)
        return np.concatenate([reference_attention(q, k, v, self.scale, extras, sinks) for q, k, v in parts])

    def check(self, extras: Extras = Extras()) -> None:
        difference = np.abs(self.attend(extras) - self.expected(extras)).max()
        assert difference < TOLERANCE[self.shape.dtype]  # False for NaN too


RAGGED = [(1, 1), (1, 33), (5, 5), (1, 64), (40, 71), (1, 97), (2, 34), (1, 32), (1, 200), (33, 33)]
"""Decoding sequences and chunks, fresh and continued, with contexts on both sides of block borders."""


@pytest.mark.parametrize("context", LENGTHS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_decode_and_chunk_at_every_length_match_float64(dtype: mx.Dtype, context: int) -> None:
    Scene(Shape(dtype=dtype), [(1, context), (min(context, 37), context)]).check()


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1)], ids=["mha", "gqa-4", "mqa"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_head_sizes_and_groups_match_float64(dtype: mx.Dtype, heads: tuple[int, int], head_dim: int) -> None:
    Scene(Shape(heads[0], heads[1], head_dim, dtype=dtype), RAGGED).check()


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 7, 8, 9, 31, 32, 33, 100, 5000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_window_softcap_and_sinks_match_float64(
    sinks: bool, softcap: float | None, window: int | None, block_size: int
) -> None:
    Scene(Shape(block_size=block_size), RAGGED).check(Extras(window, softcap, sinks))


@pytest.mark.parametrize("window", [None, 1, 9, 33, 5000])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_prompts_in_mlxs_own_attention_match_float64(
    monkeypatch: pytest.MonkeyPatch, sinks: bool, window: int | None
) -> None:
    """As on a GPU."""
    used: list[mx.array | str] = []
    own = mx.fast.scaled_dot_product_attention

    def watched(*args: Any, mask: mx.array | str, **more: Any) -> mx.array:
        used.append(mask)
        return own(*args, mask=mask, **more)

    monkeypatch.setattr(gather, "has_fused_attention", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    Scene(Shape(), RAGGED).check(Extras(window, sinks=sinks))
    assert used


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
    for extras in (Extras(), Extras(window=20), Extras(softcap=2.0), Extras(sinks=True)):
        scene = Scene(Shape(), RAGGED)
        expected = scene.attend(extras)
        assert np.isfinite(expected).all()
        starts = np.concatenate([[0], np.cumsum(scene.query_lens)])
        for i in range(0, len(RAGGED), 3):
            foreign = [block for j, table in enumerate(scene.tables) if j != i for block in table] + scene.spare
            nan = mx.full((len(foreign), 2, 32, 16), mx.nan, mx.float32)
            scene.kv.write_blocks(foreign, nan, nan)
            got = scene.attend(extras)[starts[i] : starts[i + 1]]
            np.testing.assert_allclose(got, expected[starts[i] : starts[i + 1]], atol=1e-6)
            scene.write_all()


def test_a_block_is_decoded_whole_and_what_its_last_owner_left_does_not_show() -> None:
    """NaN among the values behind a context: of a prompt, of a chunk that ends in a new block, of a decoded token that
    begins one, and while it fills up."""
    kv = LayerKVCache(4, 2, 16, mx.float32)
    nan = mx.full((4, 2, 32, 16), mx.nan)
    kv.write_blocks(range(4), nan, nan)
    rng = np.random.default_rng(0)
    keys, values = (mx.array(rng.normal(size=(101, 2, 16)).astype(np.float32)) for _ in range(2))
    end = 0
    for query_len in (20, 50, 26, 1, 1, 1, 1, 1):
        begin, end = end, end + query_len
        meta = AttentionMetadata.build([query_len], [end], [[2, 0, 3, 1]])
        kv.write(keys[begin:end], values[begin:end], meta)
        query = mx.array(rng.normal(size=(1, 4, 16)).astype(np.float32))
        out = kv.attend(query, AttentionMetadata.build([1], [end], [[2, 0, 3, 1]]), scale=0.25)
        own = [np.array(array[:end], dtype=np.float64) for array in (keys, values)]
        expected = reference_attention(np.array(query, dtype=np.float64), *own, 0.25, Extras(), None)
        np.testing.assert_allclose(np.array(out), expected, atol=1e-5)


@pytest.mark.parametrize("extras", [Extras(), Extras(window=40), Extras(softcap=5.0), Extras(sinks=True)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("many", [0, 10**9], ids=["powers by bits", "powers one by one"])
def test_lanes_change_no_number(kv_heads: int, extras: Extras, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However powers are computed; a lane has fewer of them than one stream that does all, and may do it otherwise."""
    monkeypatch.setattr(powers, "MANY", many)
    scene = Scene(Shape(2 * kv_heads, kv_heads), [(1, 70), (100, 130), (5, 5), *[(1, 200)] * 4])
    share(scene, 4, 3, 6)
    scene.write_all()
    monkeypatch.setattr(lanes, "cores", lambda: 1)
    alone = scene.attend(extras)
    monkeypatch.setattr(lanes, "HAND_OVER", 1e-12)
    monkeypatch.setattr(lanes, "cores", lambda: 4)
    np.testing.assert_array_equal(scene.attend(extras), alone)
    scene.check(extras)


def test_blocks_reserved_behind_the_context_are_not_read() -> None:
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


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("lens", [RAGGED, [(1, 40)] * 5, [(9, 40)], [(9, 40), (1, 70)], [(1, 70), (9, 40)]], ids=str)
def test_repeated_tokens_change_nothing_and_get_the_last_ones_attention(
    lens: list[tuple[int, int]], repeats: int
) -> None:
    scene = Scene(Shape(), lens)
    expected = scene.attend(Extras(window=50))
    pool = [np.array(array) for array in scene.kv.arrays]
    plain = scene.meta()
    meta, [also] = AttentionMetadata.upload(
        scene.query_lens, scene.context_lens, plain.host_block_tables, 32, [np.arange(4, dtype=np.int32)], repeats
    )
    assert meta.num_tokens == plain.num_tokens + repeats
    assert also.tolist() == [0, 1, 2, 3]

    def repeated(parts: list[Array]) -> mx.array:
        return scene.array([*parts, *[parts[-1][-1:]] * repeats])

    newest = [slice(context - query, None) for query, context in lens]
    keys, values = ([each[i][new] for i, new in enumerate(newest)] for each in (scene.keys, scene.values))
    scene.kv.write(repeated(keys), repeated(values), meta)
    out = np.array(scene.kv.attend(repeated(scene.queries), meta, scale=scene.scale, window=50))
    np.testing.assert_array_equal(out[: len(expected)], expected)
    np.testing.assert_array_equal(out[len(expected) :], np.repeat(expected[-1:], repeats, axis=0))
    for before, after in zip(pool, scene.kv.arrays, strict=True):
        np.testing.assert_array_equal(before, np.array(after))


def test_sequences_may_share_blocks() -> None:
    scene = Scene(Shape(), [(1, 50), (3, 50)])
    scene.tables[1] = scene.tables[0]
    scene.keys[1], scene.values[1] = scene.keys[0], scene.values[0]
    scene.check()


def share(scene: Scene, sequence: int, other: int, blocks: int) -> None:
    """Let a sequence begin with the blocks of an earlier one."""
    tokens = blocks * scene.shape.block_size
    assert tokens < min(scene.context_lens[sequence], scene.context_lens[other])
    scene.tables[sequence][:blocks] = scene.tables[other][:blocks]
    for rows in (scene.keys, scene.values):
        rows[sequence][:tokens] = rows[other][:tokens]


def decode_runs(scene: Scene, window: int | None = None) -> list[tuple[list[int], list[int]]]:
    plan = make_plan(scene.meta(), window, scene.shape.num_heads, scene.shape.num_kv_heads).decodes
    assert plan is not None
    num_kv_heads = scene.shape.num_kv_heads
    blocks = [mx.concatenate([share.places for share in run.shares]) for run in plan.shared]  # [kv_head, block]
    for places in blocks:
        assert (places % num_kv_heads == mx.arange(num_kv_heads)[:, None]).all()
        assert (places // num_kv_heads == places[:1] // num_kv_heads).all()
    runs = [
        (run.members.tolist(), (places[0] // num_kv_heads).tolist())
        for run, places in zip(plan.shared, blocks, strict=True)
    ]
    return sorted(runs, key=lambda run: (run[0], len(run[1])))  # type: ignore[arg-type, return-value]


def test_a_system_prompt_is_attended_once_for_all_who_share_it() -> None:
    """Six sequences of one system prompt, three of them of one conversation, beside others."""
    scene = Scene(Shape(block_size=8), [(1, 70), *[(1, 200 + i) for i in range(6)], (9, 150), (1, 33)])
    for i in range(2, 7):
        share(scene, i, 1, 9)
    for i in (3, 5):
        share(scene, i, 1, 22)
    share(scene, 7, 1, 9)  # a prompt chunk
    first = scene.tables[1]
    assert decode_runs(scene) == [([1, 2, 3, 4, 5, 6], first[:9]), ([1, 3, 5], first[9:22])]
    scene.write_all()
    for extras in (Extras(), Extras(sinks=True), Extras(softcap=2.0)):
        scene.check(extras)


def test_a_window_is_shared_as_far_as_all_see_blocks_whole() -> None:
    scene = Scene(Shape(block_size=8), [(1, 400), (1, 420), (1, 410), (1, 430)])
    for i in range(1, 4):
        share(scene, i, 0, 49)
    # The last query at 429 sees 300 keys from 130 on, in the middle of block 16; at 399 the first sees from 100 on.
    assert decode_runs(scene, 300) == [([0, 1, 2, 3], scene.tables[0][17:49])]
    assert decode_runs(scene, 30) == []
    scene.write_all()
    for window in (1, 9, 30, 100, 299, 300, 301):
        scene.check(Extras(window, sinks=True))


def test_a_short_or_small_run_is_not_worth_it() -> None:
    scene = Scene(Shape(block_size=8), [(1, 300), (1, 300), (1, 300)])
    share(scene, 1, 0, 10)
    share(scene, 2, 0, 10)
    assert decode_runs(scene) == []
    share(scene, 1, 0, 27)
    assert decode_runs(scene) == [([0, 1], scene.tables[0][10:27])]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_many_large_values_do_not_pass_what_a_half_type_holds(dtype: mx.Dtype) -> None:
    """Equal scores: their weights are all 1, and add up to more than 65,504 before they are divided by their sum."""
    scene = Scene(Shape(dtype=dtype), [(1, 3000), (1, 3000), (9, 3000)])
    for i in range(3):
        scene.keys[i], scene.values[i] = 0 * scene.keys[i], 0 * scene.values[i] + 40.0
    for i in (1, 2):
        share(scene, i, 0, 93)
    scene.write_all()
    assert decode_runs(scene)
    assert np.abs(scene.attend() - 40.0).max() < 0.5


def test_a_block_of_large_values_does_not_pass_what_a_half_type_holds() -> None:
    """32 times 30,000."""
    scene = Scene(Shape(dtype=mx.float16), [(1, 64), (9, 64)])
    for i in range(2):
        scene.keys[i], scene.values[i] = 0 * scene.keys[i], 0 * scene.values[i] + 30_000.0
    scene.write_all()
    assert np.abs(scene.attend() - 30_000.0).max() < 64


def test_the_tiles_of_a_long_prompt_hold_no_bias_each() -> None:
    chunk = PromptChunk(slice(0, 2048), np.zeros(0, np.int32), 16_384, None, 8)
    before = mx.get_active_memory()
    biases = [tile.bias for tile in chunk.tiles]
    mx.eval(biases)
    assert len(biases) == 2048 // TILE
    assert [bias.shape[-1] for bias in biases] == [*range(16_384 - 2048 + TILE, 16_384 + 1, TILE)]
    assert mx.get_active_memory() - before < 2 * biases[-1].nbytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("extras", [Extras(), Extras(window=300), Extras(sinks=True), Extras(softcap=2.0)], ids=str)
def test_one_long_context_beside_short_ones_is_not_padded_to(extras: Extras, dtype: mx.Dtype) -> None:
    scene = Scene(Shape(block_size=8, dtype=dtype), [(1, 20 + i) for i in range(9)] + [(1, 700)] + [(1, 15), (1, 700)])
    share(scene, 11, 9, 30)
    scene.write_all()
    plan = make_plan(scene.meta(), extras.window, 4, 2).decodes
    assert plan is not None
    assert plan.owner is not None
    assert plan.padding is None
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
    assert decode_runs(scene)
    window = None if seed % 2 else int(rng.integers(size, 12 * size))
    scene.check(Extras(window, 3.0 if seed % 4 == 0 else None, seed % 3 == 0))


def test_one_metadata_serves_layers_of_different_windows_and_shapes() -> None:
    a, b = Scene(Shape(), RAGGED), Scene(Shape(num_kv_heads=1, head_dim=32), RAGGED)
    assert a.tables == b.tables
    meta = a.meta()
    for scene, extras in ((a, Extras()), (b, Extras(window=9)), (a, Extras(window=9)), (b, Extras())):
        assert np.abs(scene.attend(extras, meta) - scene.expected(extras)).max() < 1e-5


@pytest.mark.parametrize("fewer_first", [True, False])
def test_one_metadata_serves_pools_of_different_sizes(fewer_first: bool) -> None:
    """What shorter sequences are padded with must be the pool's own, not that of the pool that came first."""
    lens = [(1, 70), (1, 100), (1, 128)]
    small, large = Scene(Shape(), lens, spare_blocks=0), Scene(Shape(), lens, spare_blocks=0)
    grown = LayerKVCache(small.kv.num_blocks + 8, 2, 16, mx.float32)
    nan = mx.full((grown.num_blocks, 2, 32, 16), mx.nan, mx.float32)
    grown.write_blocks(list(range(grown.num_blocks)), nan, nan)
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


# -- metadata ----------------------------------------------------------------------------------------------------------


def test_metadata_places_every_token() -> None:
    meta = AttentionMetadata.build([1, 3, 2], [10, 9, 2], [[7, 2], [4, 1, 9], [0]], block_size=8)
    assert meta.num_tokens == 6
    assert meta.positions.tolist() == [9, 6, 7, 8, 0, 1]
    assert meta.slot_mapping.tolist() == [2 * 8 + 1, 4 * 8 + 6, 4 * 8 + 7, 1 * 8 + 0, 0, 1]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert meta.context_lens.tolist() == [10, 9, 2]
    assert meta.block_tables.tolist() == [[7, 2, -1], [4, 1, 9], [0, -1, -1]]
    arrays = (meta.positions, meta.slot_mapping, meta.cu_seqlens_q, meta.context_lens, meta.block_tables)
    assert {array.dtype for array in arrays} == {mx.int32}
    assert meta.max_block == 9


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "tables", "block_size", "message"),
    [
        ([], [], [], 32, "at least one sequence"),
        ([1, 1], [1], [[0], [1]], 32, "one entry per sequence"),
        ([1], [1], [], 32, "one entry per sequence"),
        ([0], [5], [[0]], 32, "sequence 0: query_len"),
        ([-1], [5], [[0]], 32, "sequence 0: query_len"),
        ([1, 6], [1, 5], [[0], [1]], 32, "sequence 1: query_len"),
        ([1], [33], [[0]], 32, "cannot hold 33 tokens"),
        ([1], [1], [[]], 32, "cannot hold 1 tokens"),
        ([1], [1], [[-1]], 32, "negative block id"),
        ([1], [1], [[0, -3]], 32, "negative block id -3"),
        ([1], [1], [[0]], 0, "block_size"),
        ([1], [1], [[2**40]], 32, "block id"),
    ],
)
def test_metadata_refuses_lists_that_do_not_fit(
    query_lens: list[int], context_lens: list[int], tables: list[list[int]], block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionMetadata.build(query_lens, context_lens, tables, block_size)


# -- whole blocks ------------------------------------------------------------------------------------------------------


def filled(num_blocks: int = 6, seed: int = 0) -> tuple[LayerKVCache, Array, Array]:
    kv = LayerKVCache(num_blocks, 2, 16, mx.float32, block_size=8)
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, num_blocks, 2, 8, 16)).astype(np.float32)
    kv.write_blocks(list(range(num_blocks)), mx.array(keys), mx.array(values))
    return kv, keys, values


def contents(kv: LayerKVCache) -> tuple[Any, Any]:
    keys, values = kv.read_blocks(list(range(kv.num_blocks)))
    return np.array(keys), np.array(values)


def test_blocks_come_back_as_they_were_written() -> None:
    kv, keys, values = filled()
    got_keys, got_values = kv.read_blocks([4, 0, 4])
    np.testing.assert_array_equal(np.array(got_keys), keys[[4, 0, 4]])
    np.testing.assert_array_equal(np.array(got_values), values[[4, 0, 4]])


def test_written_tokens_lie_at_head_and_slot_of_their_block() -> None:
    kv = LayerKVCache(3, 2, 16, mx.float32, block_size=8)
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
    read, _ = kv.read_blocks([])
    assert read.shape == (0, 2, 8, 16)
    kv.write_blocks([], read, read)
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
        with pytest.raises(ValueError, match=r"must have shape \(1, 2, 8, 16\)"):
            kv.write_blocks([0], bad, good)
        with pytest.raises(ValueError, match=r"must have shape \(1, 2, 8, 16\)"):
            kv.write_blocks([0], good, bad)
    with pytest.raises(ValueError, match="float16"):
        kv.write_blocks([0], good, good.astype(mx.float16))


# -- refusals ----------------------------------------------------------------------------------------------------------


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
        ({"backend": "cuda"}, "must be one of auto, metal, gather, got 'cuda'"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_blocks": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": mx.float32} | changed
    with pytest.raises(ValueError, match=message):
        LayerKVCache(**arguments)


def test_auto_serves_on_the_gather_backend() -> None:
    assert resolve_backend("auto") == resolve_backend("gather") == LayerKVCache(1, 1, 8, mx.float32).backend == "gather"


def one_sequence(**changed: Any) -> tuple[LayerKVCache, AttentionMetadata]:
    kv = LayerKVCache(4, 2, 16, mx.float32)
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
        (mx.zeros((3, 3, 16)), "3 query heads do not divide among 2 KV heads"),
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
        ({"window": 0}, "window must be positive, a whole number, got 0"),
        ({"softcap": 0.0}, "softcap must be positive, got 0"),
        ({"sinks": mx.zeros((2,))}, r"sinks must have shape \(4,\), got \(2,\)"),
    ],
    ids=["window", "softcap", "sinks"],
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
        ({"block_size": 16}, "blocks of 16 tokens, the pool has 32"),
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


# -- memory ------------------------------------------------------------------------------------------------------------


def addresses(kv: LayerKVCache) -> list[int]:
    mx.eval(kv.arrays)
    return [np.asarray(memoryview(array)).__array_interface__["data"][0] for array in kv.arrays]  # type: ignore[arg-type]


def one_step(kv: LayerKVCache, position: int) -> None:
    meta = AttentionMetadata.build([1], [position + 1], [list(range(position // 32 + 1))])
    data = mx.full((1, kv.num_kv_heads, kv.head_dim), float(position))
    kv.write(data, data, meta)
    out = kv.attend(mx.zeros((1, kv.num_kv_heads, kv.head_dim)), meta, scale=1.0)
    mx.eval(out, kv.arrays)


@pytest.mark.parametrize("num_blocks", [64, 1024])
def test_a_step_writes_in_place_whatever_the_size_of_the_pool(num_blocks: int) -> None:
    kv = LayerKVCache(num_blocks, 2, 64, mx.float32)
    one_step(kv, 0)
    before, memory = addresses(kv), mx.get_active_memory()
    mx.reset_peak_memory()
    for position in range(1, 5):
        one_step(kv, position)
    assert mx.get_peak_memory() - memory < 500_000 < kv.nbytes
    assert addresses(kv) == before


def test_blocks_are_copied_in_place() -> None:
    kv = LayerKVCache(512, 2, 64, mx.float32)
    before, memory = addresses(kv), mx.get_active_memory()
    mx.reset_peak_memory()
    kv.copy_blocks([(0, 1), (1, 2)])
    mx.eval(kv.arrays)
    assert mx.get_peak_memory() - memory < 500_000 < kv.nbytes
    assert addresses(kv) == before


def test_blocks_are_written_in_place() -> None:
    kv = LayerKVCache(512, 2, 64, mx.float32)
    data = mx.ones((1, 2, 32, 64))
    mx.eval(data)
    before, memory = addresses(kv), mx.get_active_memory()
    mx.reset_peak_memory()
    kv.write_blocks([3], data, data)
    mx.eval(kv.arrays)
    assert mx.get_peak_memory() - memory < 500_000 < kv.nbytes
    assert addresses(kv) == before


def test_whoever_holds_a_view_of_the_pool_keeps_its_values_at_the_price_of_a_copy() -> None:
    """`arrays` themselves are the pools and change with every write; a view that is still held stops that in place."""
    kv = LayerKVCache(64, 2, 64, mx.float32)
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
