"""The parts of an encoding are as large as the time allows."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpaged.vision.blocks import LEAST, MOST, Pace


def run(pace: Pace, seconds: Sequence[float], length: int, allowed: float) -> list[tuple[int, bool | None]]:
    """Takes slices of two blocks, of which a patch takes these seconds in its first and second phase. Returns the
    patches of each part, and whether it was said to fit."""
    found = []
    for _ in range(2):
        for phase, of_patch in zip(("heads", "rest"), seconds, strict=True):
            slices = pace.slices(phase, length, 1)  # type: ignore[arg-type]
            while True:
                fits = pace.fit(allowed)
                if (some := next(slices, None)) is None:
                    break
                found.append((some.stop - some.start, fits))
                pace.measure(of_patch * (some.stop - some.start))
    return found


def test_parts_are_as_large_as_the_time_allows() -> None:
    """After the first ones of an encoding, of which nothing is known."""
    pace = Pace()
    pace.begin()
    assert run(pace, (0.0001, 0.001), 300, 0.1) == [
        *[(LEAST, None), (236, True), (LEAST, False)],
        *[(96, True), (96, True), (44, True), (300, True)],
        *[(96, True), (96, True), (96, True), (12, True)],
    ]


def test_the_smallest_part_may_take_too_long() -> None:
    pace = Pace()
    pace.begin()
    found = run(pace, (0.001, 0.01), 128, 0.1)
    assert found == [
        *[(64, None), (64, True), (64, False), (64, False)],
        *[(96, True), (32, True), (64, False), (64, False)],
    ]


def test_a_part_that_is_none_of_a_block_tells_nothing() -> None:
    pace = Pace()
    pace.begin()
    slices = pace.slices("heads", 500, 1)
    next(slices)
    pace.measure(0.064)
    assert pace.fit(0.128) is True
    assert pace.patches["heads"] == 128
    pace.measure(9.0)
    assert pace.fit(0.1) is None
    assert next(slices) == slice(64, 192)
    pace.measure(0.128)
    assert pace.fit(0.256) is True
    assert pace.patches["heads"] == 256


def test_each_encoding_begins_with_small_parts() -> None:
    pace = Pace()
    next(pace.slices("heads", 1000, 1))
    pace.measure(0.001)
    assert pace.fit(1.0) is True
    assert pace.patches == {"heads": MOST, "rest": MOST}
    pace.begin()
    assert pace.fit(1.0) is None
    assert pace.patches == {"heads": LEAST, "rest": LEAST}


def test_slices_have_the_size_that_holds_when_they_begin() -> None:
    pace, found = Pace(), []
    pace.patches["rest"] = 64
    for some in pace.slices("rest", 30, unit=8):
        found.append((some.start, some.stop))
        pace.patches["rest"] = 128 if some.stop == 8 else 64
    assert found == [(0, 8), (8, 24), (24, 30)]
    assert [(some.start, some.stop) for some in pace.slices("heads", 3, unit=1000)] == [(0, 1), (1, 2), (2, 3)]
