"""The "cpu" backend: which blocks are attended together, what is padded, and that splitting changes no number."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.cpu import exp2, streams
from mlxpaged.cpu.attention_plan import TILE, make_plan, make_tiles
from tests.attention.scenes import Extras, Scene, Shape, share

pytestmark = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="this backend is for a CPU")


def decode_runs(scene: Scene, window: int | None = None) -> list[tuple[list[int], list[int]]]:
    plan = make_plan(scene.meta(), window, scene.shape.num_heads, scene.shape.num_kv_heads).decode
    assert plan is not None
    num_kv_heads = scene.shape.num_kv_heads
    by_run = [mx.concatenate([split.matrices for split in run.splits]) for run in plan.shared]  # [kv_head, block]
    for matrices in by_run:
        assert (matrices % num_kv_heads == mx.arange(num_kv_heads)[:, None]).all()
        assert (matrices // num_kv_heads == matrices[:1] // num_kv_heads).all()
    runs = [
        (run.members.tolist(), (matrices[0] // num_kv_heads).tolist())
        for run, matrices in zip(plan.shared, by_run, strict=True)
    ]
    return sorted(runs, key=lambda run: (run[0], len(run[1])))  # type: ignore[arg-type, return-value]


def test_a_shared_system_prompt_is_attended_once() -> None:
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


def test_only_blocks_that_all_windows_cover_are_shared() -> None:
    scene = Scene(Shape(block_size=8), [(1, 400), (1, 420), (1, 410), (1, 430)])
    for i in range(1, 4):
        share(scene, i, 0, 49)
    # The last query at 429 sees 300 keys from 130 on, in the middle of block 16; at 399 the first sees from 100 on.
    assert decode_runs(scene, 300) == [([0, 1, 2, 3], scene.tables[0][17:49])]
    assert decode_runs(scene, 30) == []
    scene.write_all()
    for window in (1, 9, 30, 100, 299, 300, 301):
        scene.check(Extras(window, sinks=True))


def test_small_runs_are_attended_as_pairs() -> None:
    scene = Scene(Shape(block_size=8), [(1, 300), (1, 300), (1, 300)])
    share(scene, 1, 0, 10)
    share(scene, 2, 0, 10)
    assert decode_runs(scene) == []
    share(scene, 1, 0, 27)
    assert decode_runs(scene) == [([0, 1], scene.tables[0][10:27])]


def test_the_tiles_of_a_long_prompt_share_one_bias() -> None:
    before = mx.get_active_memory()
    biases = [tile.bias for tile in make_tiles(2048, 16_384, None, 8)]
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
    plan = make_plan(scene.meta(), extras.window, 4, 2).decode
    assert plan is not None
    assert plan.owner is not None
    assert plan.padding is None
    scene.check(extras)


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
