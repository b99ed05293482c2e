"""Keeps a Mac awake while a request or a batch runs. The display may sleep. On other systems, nothing is done."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from mlxpaged import macos

logger = logging.getLogger(__name__)

WHY = "mlxpaged answers requests"
"""`pmset -g assertions` shows it."""

LINGER_SECONDS = 10.0
"""Seconds after the last step for which the machine is still held awake: a client may have its next request ready, and
each change is a call of another process."""


class Assertions(Protocol):
    """hold: forbids idle sleep; returns a number, or None if that is not possible. let: ends it."""

    def hold(self, why: str) -> int | None: ...
    def let(self, assertion: int) -> None: ...


class MacAssertions:
    def hold(self, why: str) -> int | None:
        return macos.hold_awake(why)

    def let(self, assertion: int) -> None:
        macos.let_sleep(assertion)


class StayAwake:
    """Any thread. The machine is held awake while there is a holder."""

    def __init__(self, assertions: Assertions | None = None) -> None:
        self._assertions = assertions or MacAssertions()
        self._lock = threading.Lock()
        self._holders = 0
        self._assertion: int | None = None
        self._allowed = True

    def choose(self, stays: bool) -> None:
        """Set whether the machine is ever held awake (--allow-sleep)."""
        with self._lock:
            self._allowed = stays
            self._fit()

    def take(self) -> None:
        with self._lock:
            self._holders += 1
            self._fit()

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            self._fit()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def _fit(self) -> None:
        wanted = self._allowed and self._holders > 0
        if wanted and self._assertion is None:
            self._assertion = self._assertions.hold(WHY)
        elif not wanted and self._assertion is not None:
            self._assertions.let(self._assertion)
            self._assertion = None


AWAKE = StayAwake()
"""That of the process."""


class Hold:
    """A holder that lets go LINGER_SECONDS after the last use. clock: seconds."""

    def __init__(self, awake: StayAwake, clock: Callable[[], float]) -> None:
        self._awake, self._clock = awake, clock
        self._used_at = 0.0
        self._is_held = False
        self._lock = threading.Lock()

    def note_use(self) -> None:
        self._used_at = self._clock()
        if not self._is_held:
            with self._lock:
                self._is_held = True
                self._awake.take()

    def rest(self) -> None:
        """Nothing uses it now."""
        if self.pause() == 0.0:
            self.end()

    def end(self) -> None:
        with self._lock:
            if self._is_held:
                self._is_held = False
                self._awake.give_back()

    def pause(self) -> float:
        """Seconds until `rest` lets go, if nothing uses it."""
        return max(0.0, self._used_at + LINGER_SECONDS - self._clock()) if self._is_held else float("inf")
