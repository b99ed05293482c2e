"""How work is shared out among cores."""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.attention import lanes
from mlxpaged.attention.lanes import HAND_OVER

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has no lanes")


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cores", lambda: 64)


def seconds_on(number: int, work: float) -> float:
    return work / number + number * HAND_OVER


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("work", [0.0, 1e-5, 1e-4, 1.3e-4, 1e-3, 1e-2, 0.03])
def test_no_other_number_of_lanes_is_much_faster(work: float) -> None:
    got = lanes.count(work)
    assert 1 <= got <= 64
    alone = [work, *(seconds_on(number, work) for number in range(2, 65))]
    assert alone[got - 1] <= 1.15 * min(alone)


@on_cpu
def test_no_more_lanes_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores in (1, 2, 3):
        monkeypatch.setattr(lanes, "cores", lambda cores=cores: cores)
        assert lanes.count(10.0) == len(lanes.shares(512, 10.0)) == len(lanes.assign(lanes.shares(512, 10.0))) == cores


def test_a_gpu_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert lanes.count(10.0) == 1
    assert lanes.shares(512, 10.0) == [slice(0, 512)]


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 8, 40, 512, 515])
@pytest.mark.parametrize("work", [1e-5, 1.21e-4, 3e-4, 1e-3, 0.02, 1.0])
def test_shares_cover_the_axis_in_whole_units(length: int, unit: int, work: float) -> None:
    got = lanes.shares(length, work, unit)
    assert [share.start for share in got] == [0, *(share.stop for share in got[:-1])]
    assert got[-1].stop == length
    assert len(got) == max(1, min(length // unit, lanes.count(work)))
    assert all(share.start % unit == 0 for share in got)
    sizes = [share.stop - share.start for share in got]
    assert min(sizes) >= (unit if len(sizes) > 1 else 0)
    bonus = length * HAND_OVER / work
    assert max(sizes) <= length / len(sizes) + bonus + 1.5 * unit
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) <= unit


@on_cpu
@pytest.mark.parametrize(
    ("length", "cores", "sizes"), [(4, 2, [2, 2]), (8, 2, [4, 4]), (8, 4, [2] * 4), (8, 3, [3, 2, 3])]
)
def test_few_heads_are_shared_out_evenly(
    length: int, cores: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "cores", lambda: cores)
    assert [share.stop - share.start for share in lanes.shares(length, 0.1)] == sizes


@on_cpu
@pytest.mark.parametrize("cores", [2, 5])
def test_the_last_lane_has_more_by_what_a_hand_over_takes(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cores", lambda: cores)
    work, length = 100 * HAND_OVER, 100_000
    other, *_, own = (share.stop - share.start for share in lanes.shares(length, work))
    assert (own - other) / length * work == pytest.approx(HAND_OVER, rel=0.01)


@on_cpu
@pytest.mark.usefixtures("many_lanes")
def test_within_a_lane_there_are_no_others() -> None:
    outer = lanes.assign(lanes.shares(3, 1.0))
    assert len(outer) == 3
    for _, on in outer:
        with on:
            assert lanes.count(1.0) == 1
            for _, inner in lanes.assign(lanes.shares(3, 1.0)):
                with inner:
                    assert lanes.count(1.0) == 1
            with lanes.contexts(2)[0]:
                assert lanes.count(1.0) == 1
            assert lanes.count(1.0) == 1
        assert lanes.count(1.0) == 3


@on_cpu
@pytest.mark.usefixtures("many_lanes")
def test_an_error_ends_a_lane() -> None:
    """As does its stream: an operation that comes after runs where it did before."""
    before = mx.default_stream(mx.Device(mx.cpu))
    inside = []

    def fail() -> None:
        with lanes.contexts(2)[0]:
            inside.append(mx.default_stream(mx.Device(mx.cpu)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside != [before]
    assert mx.default_stream(mx.Device(mx.cpu)) == before
    assert lanes.count(1.0) == 3


@on_cpu
@pytest.mark.usefixtures("many_lanes")
def test_every_thread_has_lanes_of_its_own() -> None:
    """MLX lets a stream be used by the thread that made it alone."""
    sums: list[float] = []

    def add() -> None:
        parts = []
        for share, on in lanes.assign(lanes.shares(4, 1.0)):
            with on:
                parts.append(mx.ones((4, 8))[share].sum())
        sums.append(sum(part.item() for part in parts))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    add()
    assert sums == [32.0] * 3


def test_a_process_has_a_core() -> None:
    assert lanes.cores() >= 1


@pytest.mark.parametrize(
    ("limits", "cores"), [("max 100000", math.inf), ("150000 100000", 1.5), ("", math.inf), (None, math.inf)]
)
def test_a_container_has_the_cores_it_has_the_time_of(limits: str | None, cores: float, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    if limits is not None:
        path.write_text(f"{limits}\n")
    assert lanes.quota(path) == cores


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limits")
@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (3.0, 3), (math.inf, 4)])
def test_no_more_cores_than_either_allows(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(lanes, "quota", lambda: quota)
    assert lanes.cores() == cores
