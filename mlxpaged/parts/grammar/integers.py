"""Writes regular expressions of integers, exact at any size."""

from __future__ import annotations

import re

from mlxpaged.parts.grammar.characters import numbers
from mlxpaged.parts.grammar.schema_merge import Unsatisfiable

DIGIT = "[0-9]"
RUN = re.compile(rf"(?:{re.escape(DIGIT)}){{2,}}(?!\{{)")
MAX_DIGITS = 309
"""Most digits of an integer without a bound: those of the largest double. Models write digits until max_tokens."""


def integers(low: int | None, high: int | None, minus: str = "-", plus: str = "") -> str:
    """A regular expression for the integers from `low` to `high`. minus, plus: what is before their digits."""
    found = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found.append(f"{minus}(?:{_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        found.append(f"{plus}(?:{_naturals(max(low or 0, 0), high)})")
    # Of 309 digits, a text that has each of them alone is 300 times as long.
    return RUN.sub(lambda run: f"{DIGIT}{{{len(run[0]) // len(DIGIT)}}}", f"(?:{'|'.join(found)})")


def _naturals(low: int, high: int | None) -> str:
    if high is not None and low > high:
        raise Unsatisfiable("the minimum is above the maximum")
    found = ["0"] if low == 0 else []
    low = max(low, 1)
    high = 10 ** max(MAX_DIGITS, len(str(low))) - 1 if high is None else high
    shortest, longest = len(str(low)), len(str(high))
    # Numbers with so many digits are all in the range.
    first = shortest + (low > 10 ** (shortest - 1))
    last = longest - (high < 10**longest - 1)
    if first <= last:
        found.append(f"[1-9][0-9]{{{first - 1},{last - 1}}}")
    for places in sorted({shortest, longest} - {*range(first, last + 1)}):
        least, most = max(low, 10 ** (places - 1)), min(high, 10**places - 1)
        if least <= most:
            found += numbers(least, most, places, 10, lambda _, a, b: f"[{a}-{b}]")
    return "|".join(found)
