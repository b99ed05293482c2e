"""How fast a figure grows."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def slope(readings: Sequence[tuple[float, float]]) -> float:
    """The growth of the second figure for each unit of the first, by least squares."""
    return statistics.linear_regression(*zip(*readings, strict=True)).slope


def without_step(readings: Sequence[tuple[float, float]], least: float) -> tuple[list[tuple[float, float]], float]:
    """The readings without the largest growth between two of them, and that growth, if it is at least `least`. Else the
    readings, and 0."""
    figures = [figure for _, figure in readings]
    growths = [after - before for before, after in itertools.pairwise(figures)]
    step = max(growths, default=0)
    if step < least:
        return list(readings), 0
    at = growths.index(step)
    return [(unit, figure - (step if i > at else 0)) for i, (unit, figure) in enumerate(readings)], step
