"""Who may compile a grammar now. Clients take turns: the one that has used least of the compiler lately is next, and
one that has used much leaves half of it to the others. So a flood of new schemas delays those of its own client."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_COMPILING = 2
"""Grammars that are compiled at a time, so that a slow one does not block the next one."""
MAX_WAITING = 16
"""Grammars of a client that wait."""
FREE_SECONDS = 1.0
"""A client that has used the compiler for longer is heavy, until that is some time ago. Heavy clients compile one
grammar at a time, all together, and rest as long after it: they take a half of one core at most."""
HALF_LIFE = 10.0
"""Seconds in which half of what a client has used is forgotten."""
MAX_REST = 5.0
FORGOTTEN = 0.01
"""Seconds of use that are too few to remember."""


class CompilerBusyError(Exception):
    """The grammar was not compiled, because of others. It may be tried again."""


@dataclass(eq=False)
class Turn:
    client: str
    number: int
    begun: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    since: float = 0.0


class CompileTurns:
    """Belongs to the event loop. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []
        self._used: dict[str, tuple[float, float]] = {}  # by client: seconds, and when that was counted
        self._rests_until = 0.0

    async def enter(self, client: str, timeout: float) -> Turn:
        """Wait for a turn; it lasts until `leave`. Raises CompilerBusyError after `timeout` seconds, or if too many
        grammars of the client wait already."""
        count = sum(turn.client == client for turn in self._waiting)
        if count >= MAX_WAITING:
            raise CompilerBusyError(f"{count} grammars of this client wait for the compiler; try again")
        turn = Turn(client, next(self._numbers))
        self._waiting.append(turn)
        try:
            self._begin()
            await asyncio.wait([turn.begun], timeout=timeout)
        except BaseException:
            self._give_up(turn)
            raise
        if not turn.begun.done():
            self._give_up(turn)
            raise CompilerBusyError(f"the grammar compiler was busy for {timeout:.0f} s; try again")
        return turn

    def leave(self, turn: Turn) -> None:
        """The grammar is compiled."""
        now = self._clock()
        is_heavy = self._is_heavy(turn.client)
        self._running.remove(turn)
        self._used[turn.client] = self._lately(turn.client, now) + now - turn.since, now
        if is_heavy:
            self._rests_until = now + min(now - turn.since, MAX_REST)
        for client in [each for each in self._used if self._lately(each, now) < FORGOTTEN]:
            del self._used[client]
        self._begin()

    def _give_up(self, turn: Turn) -> None:
        if turn in self._running:
            self.leave(turn)
        else:
            self._waiting.remove(turn)

    def _begin(self) -> None:
        """Begin the turns for which there is room."""
        for turn in sorted(self._waiting, key=lambda turn: (self._use(turn.client), turn.number)):
            if len(self._running) == MAX_COMPILING:
                return
            if self._is_heavy(turn.client) and not self._may_heavy_begin():
                return  # so are those after it
            self._waiting.remove(turn)
            self._running.append(turn)
            turn.since = self._clock()
            turn.begun.set_result(None)

    def _may_heavy_begin(self) -> bool:
        left = self._rests_until - self._clock()
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._begin)
        return left <= 0 and not any(self._is_heavy(turn.client) for turn in self._running)

    def _is_heavy(self, client: str) -> bool:
        return self._use(client) > FREE_SECONDS

    def _use(self, client: str) -> float:
        """Seconds that the client has used lately, with what it uses now."""
        now = self._clock()
        running = sum(now - turn.since for turn in self._running if turn.client == client)
        return self._lately(client, now) + running

    def _lately(self, client: str, now: float) -> float:
        seconds, counted = self._used.get(client, (0.0, now))
        return float(seconds * 0.5 ** ((now - counted) / HALF_LIFE))
