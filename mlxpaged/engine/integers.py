"""Writes regular expressions of integers, exact at any size."""

from __future__ import annotations

from mlxpaged.engine.characters import numbers
from mlxpaged.engine.schema_merge import Unsatisfiable


def integers(low: int | None, high: int | None) -> str:
    """A regular expression for the integers from `low` to `high`."""
    found = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found.append(f"-(?:{_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        found.append(_naturals(max(low or 0, 0), high))
    return f"(?:{'|'.join(found)})"


def _naturals(low: int, high: int | None) -> str:
    if high is not None and low > high:
        raise Unsatisfiable("the minimum is above the maximum")
    found = ["0"] if low == 0 else []
    low = max(low, 1)
    longest = len(str(low if high is None else high))
    for places in range(len(str(low)), longest + 1):
        least, most = max(low, 10 ** (places - 1)), 10**places - 1
        most = most if high is None else min(most, high)
        if least <= most:
            found += numbers(least, most, places, 10, lambda _, a, b: f"[{a}-{b}]")
    if high is None:
        found.append(f"[1-9][0-9]{{{longest},}}")
    return "|".join(found)
