"""How elementwise work is shared out among cores."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from mlxpaged.attention import lanes
from mlxpaged.attention.lanes import LEAST_ELEMENTS, MOST_LANES

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU has no lanes")


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cores", lambda: 64)


def shares(length: int, elements: int) -> list[tuple[int, int]]:
    return [share.indices(length)[:2] for share, _ in lanes.lanes(length, elements)]


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("length", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("times", [0, 1, 2, 3, 100])
def test_shares_cover_the_axis_evenly_and_none_is_small(length: int, times: int) -> None:
    got = shares(length, times * LEAST_ELEMENTS)
    assert len(got) == max(1, min(length, times, MOST_LANES))
    assert [begin for begin, _ in got] == [0, *(end for _, end in got[:-1])]
    assert got[-1][1] == length
    sizes = [end - begin for begin, end in got]
    assert max(sizes) - min(sizes) <= 1


@on_cpu
def test_no_more_lanes_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2, 3):
        monkeypatch.setattr(lanes, "cores", lambda count=count: count)
        assert len(shares(512, 10**9)) == count


@on_cpu
@pytest.mark.usefixtures("many_cores")
def test_every_thread_has_lanes_of_its_own() -> None:
    """MLX lets a stream be used by the thread that made it alone."""
    sums: list[float] = []

    def add() -> None:
        parts = []
        for share, on in lanes.lanes(4, 4 * LEAST_ELEMENTS):
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
