"""How work is split among CPU streams."""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.cpu import streams
from mlxpaged.cpu.streams import HANDOFF

on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="CPU streams are for a CPU")


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cores", lambda: 64)


def seconds_on(number: int, work: float) -> float:
    return work / number + number * HANDOFF


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("work", [0.0, 1e-5, 1e-4, 1.3e-4, 1e-3, 1e-2, 0.03])
def test_no_other_number_of_streams_is_much_faster(work: float) -> None:
    got = streams.count(work)
    assert 1 <= got <= 64
    alone = [work, *(seconds_on(number, work) for number in range(2, 65))]
    assert alone[got - 1] <= 1.15 * min(alone)


@on_cpu
def test_there_are_no_more_streams_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores in (1, 2, 3):
        monkeypatch.setattr(streams, "cores", lambda cores=cores: cores)
        assert (
            streams.count(10.0)
            == len(streams.split(512, 10.0))
            == len(streams.assign(streams.split(512, 10.0)))
            == cores
        )


def test_on_a_gpu_nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert streams.count(10.0) == 1
    assert streams.split(512, 10.0) == [slice(0, 512)]


@on_cpu
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 8, 40, 512, 515])
@pytest.mark.parametrize("work", [1e-5, 1.21e-4, 3e-4, 1e-3, 0.02, 1.0])
def test_parts_cover_the_axis_in_whole_units(length: int, unit: int, work: float) -> None:
    got = streams.split(length, work, unit)
    assert [part.start for part in got] == [0, *(part.stop for part in got[:-1])]
    assert got[-1].stop == length
    assert len(got) == max(1, min(length // unit, streams.count(work)))
    assert all(part.start % unit == 0 for part in got)
    sizes = [part.stop - part.start for part in got]
    assert min(sizes) >= (unit if len(sizes) > 1 else 0)
    bonus = length * HANDOFF / work
    assert max(sizes) <= length / len(sizes) + bonus + 1.5 * unit
    assert max(sizes[:-1], default=0) - min(sizes[:-1], default=0) <= unit


@on_cpu
@pytest.mark.parametrize(
    ("length", "cores", "sizes"), [(4, 2, [2, 2]), (8, 2, [4, 4]), (8, 4, [2] * 4), (8, 3, [3, 2, 3])]
)
def test_few_heads_are_split_evenly(length: int, cores: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cores", lambda: cores)
    assert [part.stop - part.start for part in streams.split(length, 0.1)] == sizes


@on_cpu
@pytest.mark.parametrize("cores", [2, 5])
def test_the_last_part_is_larger_by_the_time_of_a_handoff(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cores", lambda: cores)
    work, length = 100 * HANDOFF, 100_000
    other, *_, own = (part.stop - part.start for part in streams.split(length, work))
    assert (own - other) / length * work == pytest.approx(HANDOFF, rel=0.01)


@on_cpu
@pytest.mark.usefixtures("many_streams")
def test_inside_a_stream_nothing_is_split_again() -> None:
    outer = streams.assign(streams.split(3, 1.0))
    assert len(outer) == 3
    for _, on in outer:
        with on:
            assert streams.count(1.0) == 1
            for _, inner in streams.assign(streams.split(3, 1.0)):
                with inner:
                    assert streams.count(1.0) == 1
            with streams.assign([0, 1])[0][1]:
                assert streams.count(1.0) == 1
            assert streams.count(1.0) == 1
        assert streams.count(1.0) == 3


@on_cpu
@pytest.mark.usefixtures("many_streams")
def test_after_an_error_operations_run_on_the_stream_from_before() -> None:
    before = mx.default_stream(mx.Device(mx.cpu))
    inside = []

    def fail() -> None:
        with streams.assign([0, 1])[0][1]:
            inside.append(mx.default_stream(mx.Device(mx.cpu)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside != [before]
    assert mx.default_stream(mx.Device(mx.cpu)) == before
    assert streams.count(1.0) == 3


@on_cpu
@pytest.mark.usefixtures("many_streams")
def test_every_thread_has_streams_of_its_own() -> None:
    """MLX lets only the thread that made a stream use it."""
    sums: list[float] = []

    def add() -> None:
        parts: list[Any] = []
        for part, on in streams.assign(streams.split(4, 1.0)):
            with on:
                parts.append(mx.ones((4, 8))[part].sum())
        sums.append(sum(total.item() for total in parts))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    add()
    assert sums == [32.0] * 3


def test_a_process_has_a_core() -> None:
    assert streams.cores() >= 1


@pytest.mark.parametrize(
    ("limits", "cores"), [("max 100000", math.inf), ("150000 100000", 1.5), ("", math.inf), (None, math.inf)]
)
def test_a_container_has_the_cores_it_has_the_time_of(limits: str | None, cores: float, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    if limits is not None:
        path.write_text(f"{limits}\n")
    assert streams.container_cpus(path) == cores


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limits")
@pytest.mark.parametrize(("quota", "cores"), [(0.5, 1), (1.5, 1), (3.0, 3), (math.inf, 4)])
def test_no_more_cores_than_either_allows(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(streams, "container_cpus", lambda: quota)
    assert streams.cores() == cores
