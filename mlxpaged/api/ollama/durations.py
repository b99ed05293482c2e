"""Reads `keep_alive`: how long a model is to stay loaded after its last request."""

from __future__ import annotations

import math
import re
from typing import Any

SECONDS = {"ns": 1e-9, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Units of Go's durations."""
PART = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(SECONDS)})", re.ASCII)
DURATION = re.compile(rf"[+-]?(?:0|(?:{PART.pattern})+)", re.ASCII)
LONGEST = 2**63 * 1e-9
"""Seconds that Go's durations do not reach. From there on, a model stays loaded."""
MOST_CHARACTERS = 100
EXAMPLES = 'must be a number of seconds, or a duration such as "5m", "1h30m", "500ms" or "-1m"'


def stay_of(given: Any) -> float:
    """Seconds, 0 or more; math.inf for ever, if it is below 0. given: seconds, or a duration as Go writes it. Raises
    ValueError, also for values of other kinds."""
    if isinstance(given, bool) or not isinstance(given, str | float | int):
        raise ValueError(EXAMPLES)
    seconds = seconds_of(given) if isinstance(given, str) else given
    if seconds < 0 or seconds >= LONGEST:  # an integer may be too large for a float
        return math.inf
    if math.isnan(seconds):
        raise ValueError(EXAMPLES)
    return float(seconds)


def seconds_of(text: str) -> float:
    """Raises ValueError."""
    if len(text) > MOST_CHARACTERS or DURATION.fullmatch(text) is None:
        raise ValueError(EXAMPLES)
    seconds = sum(float(number) * SECONDS[unit] for number, unit in PART.findall(text))
    return -seconds if text.startswith("-") else seconds
