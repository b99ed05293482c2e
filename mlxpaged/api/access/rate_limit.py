"""Limits the requests and tokens per minute of a key."""

from __future__ import annotations

import math
from collections.abc import Callable

SECONDS_PER_MINUTE = 60.0


class Bucket:
    """A token bucket starts full and is refilled evenly. An answer may overdraw it, since its length is not known."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        """clock: seconds."""
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        refilled = (now - self._at) * self.per_minute / SECONDS_PER_MINUTE
        self._level, self._at = min(self.per_minute, self._level + refilled), now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * SECONDS_PER_MINUTE / self.per_minute


class Allowance:
    """Counts what is left of a key's limits. A request needs one request and one token. Used on the event loop only."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float]) -> None:
        """requests, tokens: per minute; None: no limit."""
        self.limits = {"requests": requests, "tokens": tokens}
        self._buckets = {name: Bucket(limit, clock) for name, limit in self.limits.items() if limit is not None}

    def exhausted(self) -> str | None:
        """Returns the limit that is reached: "requests", "tokens" or None. Of both, the one that takes longer."""
        name = max(self._buckets, key=self.wait, default=None)
        return None if name is None or self.wait(name) <= 0 else name

    def wait(self, name: str) -> float:
        """Returns the seconds until this limit accepts the next request."""
        return self._buckets[name].seconds_until(1)

    def take(self, name: str, amount: int) -> None:
        if name in self._buckets:
            self._buckets[name].take(amount)

    def headers(self) -> dict[str, str]:
        """Returns the headers that OpenAI's service sends: limit, rest, and time until the limit is full again."""
        found = {}
        for name, bucket in self._buckets.items():
            found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            found[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return found
