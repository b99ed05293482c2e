"""How work is shared out among cores."""

from __future__ import annotations

import threading

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
        assert lanes.count(10.0) == len(lanes.shares(512, 10.0)) == len(lanes.lanes(512, 10.0)) == cores


def test_a_gpu_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert lanes.count(10.0) == 1
    assert lanes.shares(512, 10.0) == [slice(0, 512)]


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 40, 512, 515])
@pytest.mark.parametrize("work", [1e-5, 1e-3, 0.02, 1.0])
def test_shares_cover_the_axis_in_whole_units(length: int, unit: int, work: float) -> None:
    got = lanes.shares(length, work, unit)
    assert [share.start for share in got] == [0, *(share.stop for share in got[:-1])]
    assert got[-1].stop == length
    assert len(got) == max(1, min(length // unit, lanes.count(work)))
    sizes = [share.stop - share.start for share in got]
    assert len(set(sizes[:-1])) <= 1
    assert min(sizes) >= (unit if len(sizes) > 1 else 0)
    assert all(size % unit == 0 for size in sizes[:-1])
    assert sizes[-1] == max(sizes)


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
    outer = lanes.lanes(3, 1.0)
    assert len(outer) == 3
    for _, on in outer:
        with on:
            assert lanes.count(1.0) == 1
            for _, inner in lanes.lanes(3, 1.0):
                with inner:
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
        for share, on in lanes.lanes(4, 1.0):
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
