"""How fast a figure grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def slope(readings: Sequence[tuple[float, float]]) -> float:
    """The growth of the second figure for each unit of the first, by least squares."""
    return statistics.linear_regression(*zip(*readings, strict=True)).slope
