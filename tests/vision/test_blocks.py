"""The parts of an encoding are as large as the time allows."""

from __future__ import annotations

from mlxpaged.vision.blocks import LEAST, MOST, Pace


def test_parts_follow_what_they_take() -> None:
    pace, sizes = Pace(), []
    for seconds in (0.2, 0.11, 0.05, 0.2, 0.2, 0.03, 0.03, 0.03, 0.03):
        pace.adapt(seconds, allowed=0.1)
        sizes.append(pace.patches["heads"])
    assert sizes == [256, 128, 128, LEAST, LEAST, 128, 256, MOST, MOST]
    assert pace.patches["rest"] == MOST


def test_slices_have_the_size_that_holds_when_they_begin() -> None:
    pace, found = Pace(), []
    pace.patches["rest"] = 64
    for some in pace.slices("rest", 30, unit=8):
        found.append((some.start, some.stop))
        pace.adapt(*((0.0, 1.0) if some.stop == 8 else (1.0, 0.5)))
    assert found == [(0, 8), (8, 24), (24, 30)]
    assert pace.patches == {"heads": MOST, "rest": LEAST}
    assert [(some.start, some.stop) for some in pace.slices("heads", 3, unit=1000)] == [(0, 1), (1, 2), (2, 3)]
