"""How long other processes have been silent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mlxpaged.cluster.messages import BEAT_SECONDS, LOST_SECONDS


class Silence:
    """Counts the seconds in which nothing came from each peer.

    Time between two calls of `lost` counts as BEAT_SECONDS at most: if this process or the whole machine was stopped
    for longer, what its peers have sent meanwhile has not been read yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._lock = threading.Lock()
        self._seconds: dict[int, float] = {}

    def heard(self, peer: int = 0) -> None:
        """Note that something came from a peer, by default from the only one. For any thread."""
        with self._lock:
            self._seconds[peer] = -self._since_last_look()  # which the next look adds

    def lost(self) -> list[int]:
        """The peers that have been silent for LOST_SECONDS since they were heard."""
        with self._lock:
            passed = self._since_last_look()
            self._looked_at = self._clock()
            self._seconds = {peer: silent + passed for peer, silent in self._seconds.items()}
            return [peer for peer, silent in self._seconds.items() if silent >= LOST_SECONDS]

    def _since_last_look(self) -> float:
        return min(self._clock() - self._looked_at, BEAT_SECONDS)
