"""The "cpu" backend: which blocks are attended together, what is padded, and that splitting changes no number."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.pool import Locality
from mlxpaged.cpu import attention_plan, exp2, streams
from mlxpaged.cpu.attention_plan import MAX_ROWS, Pieces, SharedRun, make_plan, make_tiles, piece_length, tile_length
from tests.attention.scenes import Extras, Scene, Shape, share

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="this backend is for a CPU")


def shared_runs(scene: Scene, window: int | None = None) -> list[tuple[list[int], list[int]]]:
    """Sequences and blocks of each run."""
    plan = make_plan(scene.meta(), Locality(window), scene.shape.num_heads, scene.shape.num_kv_heads).decode
    assert plan is not None
    num_kv_heads, runs = scene.shape.num_kv_heads, []
    for parts in plan.work[1:]:
        assert all(isinstance(part, SharedRun) for part in parts)
        matrices, queries = mx.concatenate([part.matrices for part in parts], axis=1), parts[0].queries
        for indices in (matrices, queries):
            assert (indices % num_kv_heads == mx.arange(num_kv_heads)[:, None]).all()
            assert (indices // num_kv_heads == indices[:1] // num_kv_heads).all()
        runs.append(((queries[0] // num_kv_heads).tolist(), (matrices[0] // num_kv_heads).tolist()))
    return sorted(runs)  # type: ignore[arg-type, return-value]


@pytest.mark.usefixtures("many_streams")
def test_a_shared_system_prompt_is_attended_once() -> None:
    """Six sequences of one system prompt, three of them of one conversation, beside others of another prompt."""
    scene = Scene(Shape(block_size=8), [(1, 70), *[(1, 200 + i) for i in range(6)], (9, 150), (1, 163), (1, 161)])
    for i in range(2, 7):
        share(scene, i, 1, 9)
    for i in (3, 5):
        share(scene, i, 1, 22)
    share(scene, 7, 1, 9)  # a prompt chunk, which is not among the decoding sequences
    share(scene, 9, 8, 20)
    runs = [([1, 2, 3, 4, 5, 6], scene.tables[1][:9]), ([7, 8], scene.tables[8][:20])]
    assert shared_runs(scene) == runs
    assert shared_runs(scene, 100) == []
    scene.write_all()
    for extras in (Extras(), Extras(sinks=True), Extras(softcap=2.0), Extras(window=100)):
        scene.check(extras)


def test_a_sequence_keeps_its_last_block() -> None:
    scene = Scene(Shape(block_size=8), [(1, 192)] * 3)
    for i in (1, 2):
        share(scene, i, 0, 23)
    assert shared_runs(scene) == [([0, 1, 2], scene.tables[0][:23])]


def test_small_runs_are_attended_with_the_rest() -> None:
    scene = Scene(Shape(block_size=8), [(1, 300), (1, 300), (1, 300)])
    share(scene, 1, 0, 10)
    share(scene, 2, 0, 10)
    assert shared_runs(scene) == []
    share(scene, 1, 0, 27)
    share(scene, 2, 0, 27)
    assert shared_runs(scene) == [([0, 1, 2], scene.tables[0][:27])]


def test_the_tiles_of_a_long_prompt_share_one_bias() -> None:
    before = mx.get_active_memory()
    biases = [tile.bias for tile in make_tiles(2048, 16_384, None, 8, 64)]
    mx.eval(biases)
    assert len(biases) == 2048 // 64
    assert [bias.shape[-1] for bias in biases] == [*range(16_384 - 2048 + 64, 16_384 + 1, 64)]
    assert mx.get_active_memory() - before < 2 * biases[-1].nbytes


def test_the_tiles_of_many_heads_have_fewer_queries() -> None:
    assert tile_length(100, 1, 128) == 15  # seven tiles
    assert MAX_ROWS == 16 * 128
    tiles = make_tiles(100, 300, None, 128, 15)
    assert [tile.bias.shape[1] for tile in tiles] == [128 * 15] * 6 + [128 * 10]
    assert [(tile.rows.start, tile.rows.stop) for tile in tiles] == [(i, min(i + 15, 100)) for i in range(0, 100, 15)]
    assert [tile.keys.stop for tile in tiles] == [*range(215, 300, 15), 300]
    Scene(Shape(128, 1, 24, value_size=16, latent=True), [(40, 60), (20, 20)]).check(Extras(window=30))


@pytest.mark.parametrize(
    ("query_len", "num_kv_heads", "group", "length"),
    [(100, 3, 3, 100), (140, 3, 3, 70), (2048, 3, 3, 82), (2048, 8, 4, 44), (1, 8, 8, 1)],
)
def test_tiles_are_as_long_as_takes_the_least_time(query_len: int, num_kv_heads: int, group: int, length: int) -> None:
    """Of fewer heads, more scores may be masked than of many."""
    assert tile_length(query_len, num_kv_heads, group) == length


@pytest.mark.parametrize("extras", [Extras(), Extras(window=40), Extras(softcap=5.0), Extras(sinks=True)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("many", [0, 10**9], ids=["polynomial", "one by one"])
def test_splitting_changes_no_number(kv_heads: int, extras: Extras, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has fewer powers than one stream that computes all, so both ways to compute them are tried."""
    monkeypatch.setattr(exp2, "MIN_SIZE", many)
    scene = Scene(Shape(2 * kv_heads, kv_heads), [(1, 70), (100, 130), (5, 5), *[(1, 200)] * 4])
    share(scene, 4, 3, 6)
    scene.write_all()
    monkeypatch.setattr(streams, "cores", lambda: 1)
    alone = scene.attend(extras)
    monkeypatch.setattr(streams, "HANDOFF", 1e-12)
    monkeypatch.setattr(streams, "cores", lambda: 4)
    np.testing.assert_array_equal(scene.attend(extras), alone)
    scene.check(extras)


def pieces(scene: Scene) -> list[Pieces]:
    plan = make_plan(scene.meta(), Locality(None), scene.shape.num_heads, scene.shape.num_kv_heads).decode
    assert plan is not None
    return [part for part in plan.work[0] if isinstance(part, Pieces)]


@pytest.mark.parametrize(
    ("counts", "cores", "length"),
    [
        ([5, 6, 7, 6], 1, 7),
        ([5, 6, 7, 6], 2, 7),
        ([1], 2, 1),
        ([4000], 1, 4000),
        ([4000], 2, 4000),  # half of the heads for each stream
        ([4, 4, 4, 4000], 1, 4),  # 12,000 blocks that count for nothing would take longer than a merge
        ([2000] * 16 + [4000], 1, 16),
    ],
)
def test_pieces_are_as_long_as_takes_the_least_time(
    counts: list[int], cores: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "cores", lambda: cores)
    assert piece_length(np.array(counts), 8) == length


@pytest.mark.parametrize("merge", [0.0, 1.0], ids=["short pieces", "whole sequences"])
@pytest.mark.parametrize("extras", [Extras(), Extras(window=40), Extras(softcap=5.0), Extras(sinks=True)], ids=str)
def test_pieces_of_any_length_make_the_same_answer(
    merge: float, extras: Extras, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "MERGE", merge)
    scene = Scene(Shape(6, 3, block_size=8), [(1, 70), (1, 1), (1, 8), (1, 9), (1, 300), (1, 16)])
    lengths = {part.matrices.shape[1] for part in pieces(scene)}
    assert lengths == {38} if merge else max(lengths) < 38
    scene.write_all()
    scene.check(extras)
