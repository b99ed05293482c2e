"""Writes regular expressions of the numbers in a range, as programs write doubles: with all digits, or with an exponent
after a single digit and a fraction. No number has more than MAX_PLACES digits after its point, so each ends."""

from __future__ import annotations

import functools
import math
import sys
from decimal import Decimal
from fractions import Fraction

from mlxpaged.parts.grammar.integers import integers
from mlxpaged.parts.grammar.schema_merge import Unsatisfiable

MAX_PLACES = 22
"""Most digits after the point. The shortest text of a double has 17 digits, and JavaScript writes those from 1e-6 on
without an exponent: after five zeros."""
SCALE: int = 10**MAX_PLACES
MAX_PLAIN = 10**308 * SCALE - 1
"""Largest number without an exponent, in units of the last place. Programs write those from 1e21 on with one."""
MANTISSAS = 9 * SCALE
"""Mantissas of one exponent, from 1 to below 10."""
OTHER_EXPONENT = rf"-?(?:0|[1-9][0-9]{{0,16}})(?:\.[0-9]{{1,{MAX_PLACES}}})?[eE][+-]?[0-9]{{1,2}}"
"""A number with an exponent that no program writes, like 12e3. Each is far below the largest double."""


@functools.lru_cache(maxsize=256)
def decimals(low: float | None, high: float | None) -> str:
    """A regular expression for the doubles from `low` to `high`. It compares digits: a text is in the range if its
    value is, and then the double that is nearest to it is in it too. Raises Unsatisfiable if there is none."""
    if low is None and high is None:
        return f"(?:{decimals(-sys.float_info.max, sys.float_info.max)}|{OTHER_EXPONENT})"
    low, high = -sys.float_info.max if low is None else low, sys.float_info.max if high is None else high
    if low > high:
        raise Unsatisfiable("the minimum is above the maximum")
    found = []
    if low < 0:
        found += [f"-{each}" for each in _positive(max(-high, 0), -low)]
    if high >= 0:
        found += _positive(max(low, 0), high)
    return f"(?:{'|'.join(found)})"


def _positive(low: float, high: float) -> list[str]:
    """The numbers of a range without a sign."""
    least, most = math.ceil(_exact(low) * SCALE), min(math.floor(_exact(high) * SCALE), MAX_PLAIN)
    found = _plain(least, most)
    if high:
        # An exponent and a mantissa are compared like the digits of a number.
        for first, last, begin, end in _spans(_order(low or math.ulp(0.0)), _order(high), MANTISSAS):
            mantissa = "|".join(_plain(begin + SCALE, end + SCALE))
            found.append(rf"(?:{mantissa})[eE]{integers(first, last, '-0?', '[+]?0?')}")
    return found


def _exact(number: float) -> Fraction:
    """The value of the number's shortest text."""
    return Fraction(repr(number))


def _order(number: float) -> int:
    """Where a number is in the order of those with an exponent."""
    text = Decimal(repr(float(number)))
    return text.adjusted() * MANTISSAS + int(Fraction(text.scaleb(-text.adjusted())) * SCALE) - SCALE


def _plain(least: int, most: int) -> list[str]:
    """The numbers without an exponent, in units of the last place."""
    spans = _spans(least, most, SCALE) if least <= most else []
    return [
        integers(first, last) + rf"(?:\.{_digits(begin, end, MAX_PLACES)}){'' if begin else '?'}"
        for first, last, begin, end in spans
    ]


def _digits(least: int, most: int, places: int) -> str:
    """One digit or more after the point, of so many places. Those that are left out are zeros."""
    if (least, most) == (0, 10**places - 1):
        return f"(?:[0-9]{{1,{places}}})"
    found = []
    for first, last, begin, end in _spans(least, most, 10 ** (places - 1)):
        rest = f"{_digits(begin, end, places - 1)}{'' if begin else '?'}" if places > 1 else ""
        found.append(f"[{first}-{last}]{rest}")
    return f"(?:{'|'.join(found)})"


def _spans(least: int, most: int, size: int) -> list[tuple[int, int, int, int]]:
    """A range as ranges of a quotient by `size`, each with the range of the remainder: first, last, begin, end."""
    (first, begin), (last, end) = divmod(least, size), divmod(most, size)
    if first == last:
        return [(first, last, begin, end)]
    spans = []
    if begin:
        spans.append((first, first, begin, size - 1))
        first += 1
    if end < size - 1:
        spans.append((last, last, 0, end))
        last -= 1
    return [*spans, (first, last, 0, size - 1)] if first <= last else spans
