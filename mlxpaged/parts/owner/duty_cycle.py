"""Leaves a part of the GPU's time to the person who uses the Mac: macOS gives no GPU work a lower priority.

A duty cycle of 0.5 lets the GPU rest after each step for as long as the step took. That is done while the machine is
used, on battery, in low power mode, or hot. Otherwise steps follow each other, and overlap. The text of a step is sent
after the pause. Embeddings have steps of their own, without pauses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part, Tokens
from mlxpaged.core.step import Step
from mlxpaged.parts.owner.sensors import Readings, Sensors, Thermal

logger = logging.getLogger(__name__)

USED_SECONDS = 60.0
"""Seconds after the last touch of keyboard, mouse or trackpad in which the machine counts as used."""

POLL_SECONDS = 1.0
"""Seconds between two readings of the sensors."""

LONGEST_PAUSE = 0.9
"""Seconds. The engine thread takes no command in a pause: a new request or the end of one waits for it."""


def reason_of(readings: Readings) -> str | None:
    """Why the GPU is left to others; None if it need not be."""
    if readings.idle_seconds < USED_SECONDS:
        return "this Mac is in use"
    if readings.thermal >= Thermal.SERIOUS:
        return "this Mac is hot"
    if readings.low_power:
        return "this Mac is in low power mode"
    return "this Mac runs on battery" if readings.on_battery else None


def pause_after(seconds: float, share: float) -> float:
    """Seconds without work after a step that took so long, so that the GPU computes for this share of the time. It is
    larger after steps of more than LONGEST_PAUSE."""
    return min(LONGEST_PAUSE, max(0.0, seconds) * (1 / share - 1))


class DutyCycle(Part):
    """The first part: it pauses before others prepare the next step. While the GPU is left to others, no step is
    launched before the last one has ended. share: of the time in which the GPU may compute then. clock: seconds."""

    def __init__(
        self, share: float, sensors: Sensors, clock: Callable[[], float], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._share, self._sensors, self._clock, self._sleep = share, sensors, clock, sleep
        self._reason: str | None = None
        self._read_at: float | None = None
        self._launched_at: float | None = None
        self._ended: tuple[float, float] | None = None  # of the last step: when, and how long it took

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        self._poll()
        if self._reason is None:
            return Need.NOTHING
        if in_flight is not None:
            return Need.FINISHED
        ended, self._ended = self._ended, None
        if ended is not None:
            at, seconds = ended
            rest = pause_after(seconds, self._share) - (self._clock() - at)
            if rest > 0:
                self._sleep(rest)
        return Need.NOTHING

    def launched(self, step: Step, waited: float) -> None:
        self._launched_at = self._clock()

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        now = self._clock()
        if self._launched_at is not None:
            self._ended = now, now - self._launched_at

    def _poll(self) -> None:
        now = self._clock()
        if self._read_at is not None and now < self._read_at + POLL_SECONDS:
            return
        self._read_at, before = now, self._reason
        self._reason = reason_of(self._sensors.read())
        if before is None and self._reason is not None:
            logger.info("%s: the GPU computes for %.0f %% of the time", self._reason, 100 * self._share)
        elif before is not None and self._reason is None:
            logger.info("steps follow each other without pauses again")
