"""Decides whose turn it is if the models that requests ask for do not fit into the memory together.

Requests are grouped by model: a model that is loaded answers all its requests before another one takes its room. No
request waits for ever: once one has waited for the longest wait, the loaded model takes no more requests, ends those
that it has, and makes room. New requests for it wait for its next turn. A model keeps its room for some times what its
load took, so that loads take a bounded share of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import NamedTuple

from mlxpaged.core.scheduling.sequence import Priority

PATIENCE = {Priority.HIGH: 0.25, Priority.NORMAL: 1.0, Priority.LOW: 4.0}
"""What a request waits for at most, in longest waits."""

STAY = 3.0
"""A model keeps its room for so many times what its load took: loads take at most a quarter of the time."""


GAPS = 3.0
"""A loaded model without requests keeps its room for so many of the pauses that it usually has, in case its client goes
on, if that is less than what its load took."""

GAP_SHARE = 0.3
"""What the latest pause counts in the usual one."""

FIRST_GAP = 0.1
"""The usual pause before any is known, as a share of what the load took."""


AFTER_WAKING = 3
"""Rounds of the event loop in which all models that a change has woken ask for their turn."""


class Room(NamedTuple):
    """What a loaded model holds. since: when its load ended. load_seconds: what the load took."""

    since: float
    load_seconds: float

    @property
    def until(self) -> float:
        """It gives its room to no other model before, unless it has no requests."""
        return self.since + STAY * self.load_seconds


FROM_THE_START = Room(-math.inf, 0.0)


class SwapLine:
    """The models that wait for room or for their load, in the order of their most urgent requests. longest_wait:
    seconds. clock: seconds. Belongs to the event loop."""

    def __init__(self, longest_wait: float, clock: Callable[[], float]) -> None:
        self._longest_wait, self._clock = longest_wait, clock
        self._dues: dict[str, Counter[float]] = {}  # by model: until when its requests are to have room
        self._blocked: dict[str, int] = {}  # models that have found no room, with the tasks that wait for it
        self._rooms: dict[str, Room] = {}
        self._idle_since: dict[str, float] = {}  # models without requests
        self._gaps: dict[str, float] = {}  # seconds for which a model usually has no requests
        self._asking: Counter[str] = Counter()  # models whose tasks wait for their turn
        self._is_taken = False
        self._changed = asyncio.Event()

    # -- requests ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waits(self, model: str, priority: Priority) -> Iterator[None]:
        """A request waits for its model while the context lasts."""
        due = self._clock() + PATIENCE[priority] * self._longest_wait
        dues = self._dues.setdefault(model, Counter())
        dues[due] += 1
        try:
            yield
        finally:
            dues[due] -= 1
            if not dues[due]:
                del dues[due]
            if not dues and self._dues.get(model) is dues:
                del self._dues[model]
            self.note_change()

    def idle(self, model: str) -> None:
        """The last request of a model has ended."""
        self._idle_since[model] = self._clock()
        self.note_change()

    def asked(self, model: str) -> None:
        """A request names a model."""
        if (since := self._idle_since.pop(model, None)) is not None:
            gap = self._clock() - since
            self._gaps[model] = gap + (1 - GAP_SHARE) * (self._gaps.get(model, gap) - gap)

    def due(self, model: str) -> float:
        """Until when the most urgent request of a model is to have room. math.inf if none waits."""
        return min(self._dues.get(model, ()), default=math.inf)

    def ahead(self, model: str) -> int:
        """Requests of other models whose turn comes before that of a model."""
        due = self.due(model)
        return sum(dues.total() for name, dues in self._dues.items() if name != model and min(dues) < due)

    # -- turns -------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def turn(self, model: str) -> AsyncIterator[None]:
        """One model is loaded at a time, the most urgent one first."""
        self._asking[model] += 1
        try:
            for _ in range(AFTER_WAKING):
                await asyncio.sleep(0)
            while self._is_taken or min(self._asking, key=self.due) != model:
                await self.change()
        finally:
            self._asking[model] -= 1
            self._asking = +self._asking
            self.note_change()
        self._is_taken = True
        try:
            yield
        finally:
            self._is_taken = False
            self.note_change()

    async def change(self, timeout: float | None = None) -> None:
        """Wait until something has changed that may give a model its turn or room. timeout: seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    def note_change(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # -- room --------------------------------------------------------------------------------------------------------

    def loaded(self, model: str, load_seconds: float) -> None:
        """A model has been loaded."""
        self._rooms[model] = Room(self._clock(), load_seconds)

    def unloaded(self, model: str) -> None:
        self._rooms.pop(model, None)
        self.note_change()

    @contextlib.contextmanager
    def blocked(self, model: str) -> Iterator[None]:
        """A model has found no room while the context lasts, because others have requests."""
        self._blocked[model] = self._blocked.get(model, 0) + 1
        try:
            yield
        finally:
            self._blocked[model] -= 1
            if not self._blocked[model]:
                del self._blocked[model]
            self.note_change()

    def linger(self, model: str) -> float:
        """Seconds for which a loaded model without requests keeps its room, because its client may go on."""
        load_seconds = self._rooms.get(model, FROM_THE_START).load_seconds
        seconds = GAPS * self._gaps.get(model, FIRST_GAP * load_seconds)
        return seconds if seconds <= load_seconds else 0.0

    def leaving(self, loaded: Iterable[str]) -> str | None:
        """The model that takes no new requests now, because another one has waited for long enough: the one that has
        had its room for the longest time. None if there is none. loaded: models that may be unloaded."""
        if not self._blocked:
            return None
        rooms = {name: self._rooms.get(name, FROM_THE_START) for name in loaded}
        due = min((self.due(name) for name in self._blocked if name not in rooms), default=math.inf)
        now = self._clock()
        over = [name for name, room in rooms.items() if now >= max(due, room.until)]
        return min(over, key=lambda name: rooms[name].since, default=None)
