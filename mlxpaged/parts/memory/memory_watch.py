"""Watches the system's memory pressure, and gives back the freed buffers that MLX keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

from mlxpaged.parts.memory.memory_pressure import MemoryPressure, memory_pressure

POLL_SECONDS = 1.0
"""Seconds between two readings of the system's memory pressure. A reading takes microseconds."""

IDLE_SECONDS = 60.0
"""Seconds without a request after which an engine gives memory back. A person often answers within a minute, and seldom
after ten."""


class MemoryWatch:
    """Belongs to the engine thread. clock: seconds. clear_cache: frees MLX's freed buffers. pressure: what the system
    says.

    level: the last reading. is_idle: whether the engine had rested for IDLE_SECONDS then.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        clear_cache: Callable[[], None],
        pressure: Callable[[], MemoryPressure] = memory_pressure,
    ) -> None:
        self._clock, self._clear_cache, self._pressure = clock, clear_cache, pressure
        self._active_at, self._polled_at = clock(), -math.inf
        self._is_short = False  # whether an allocation has failed since the last poll
        self.level = MemoryPressure.NORMAL
        self.is_idle = False

    def note_use(self) -> None:
        """The engine works, or has just given memory back: IDLE_SECONDS begin now."""
        self._active_at = self._clock()

    def note_failure(self) -> None:
        """An allocation failed: memory is critical in the next poll, which is due at once."""
        self._is_short = True
        self._polled_at = -math.inf

    def poll(self, device_is_idle: bool) -> bool:
        """Read the pressure if it is time, and return whether it was. Gives back freed buffers if the system is short
        of memory, or if both the engine and the device are idle: the next step of another model would take them
        again."""
        now = self._clock()
        if now < self._polled_at + POLL_SECONDS:
            return False
        self._polled_at = now
        self.level = MemoryPressure.CRITICAL if self._is_short else self._pressure()
        self._is_short = False
        self.is_idle = now >= self._active_at + IDLE_SECONDS
        if (self.is_idle and device_is_idle) or self.level is not MemoryPressure.NORMAL:
            self._clear_cache()
        return True
