"""Clients take turns with what the server does for a few at a time: tokenizing, reading bodies, compiling grammars.

The next turn is that of the client that will have used least after it: the seconds that it has used lately, and those
that this turn takes by its size. Each second that a turn has waited counts as AGEING seconds less. So

- a client that has used little goes before one that has used much;
- of turns that are alike otherwise, small ones go before large ones, and earlier ones before later ones;
- a turn is overtaken only by those that are asked for in the OVERTAKEN seconds after it, and waits for no others.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

Result = TypeVar("Result")

AGEING = 0.1
"""Seconds of use that each second of waiting makes up for. The classes of requests age at the same rate in the engine
(`core/scheduling/sequence.py`)."""
MAX_USE = 5.0
MAX_COST = 1.0
"""Seconds that count at most of what a client has used, and of what a turn is to take."""
OVERTAKEN = (MAX_USE + MAX_COST) / AGEING
"""Seconds. A turn that is asked for later than that after another one is always behind it, whatever their clients have
used: its seconds of waiting are fewer than those of the other one by more than all else can make up for."""
HALF_LIFE = 10.0
"""Seconds in which half of what a client has used is forgotten."""
FORGOTTEN = 0.001
"""Seconds of use that are too few to remember."""
MAX_REST = 5.0

ORDER = attrgetter("order")


class TurnRefusedError(Exception):
    """Nothing was done, because of others. It may be tried again."""


@dataclass(frozen=True)
class Rules:
    """What clients share, and how.

    what: the plural of what a turn is for, in error messages.
    at_once: turns that last at the same time.
    places: turns of a client that wait; one more is refused.
    seconds: that a turn takes for each unit of its size, about.
    free_seconds: a client that has used more lately is heavy.
    heavy_at_once: turns of heavy clients that last at the same time, all together.
    rests: whether heavy clients rest after a turn for as long as it has lasted.
    """

    what: str
    at_once: int
    places: int
    seconds: float = 0.0
    free_seconds: float = math.inf
    heavy_at_once: int = 1
    rests: bool = False


@dataclass(eq=False)
class Turn:
    """asked, since: when it was asked for and when it began, on the clock of its Turns. order: the lowest of a client's
    turns is next. is_heavy: whether its client was heavy when it began."""

    client: str
    size: int
    asked: float
    order: tuple[float, int]
    has_begun: bool = False
    since: float = 0.0
    is_heavy: bool = False
    waiter: asyncio.Future[None] | None = None


class Turns:
    """Belongs to the event loop. clock: seconds. waiting: turns by client, in their order. has_room: whether a turn of
    this size may begin, in addition to the rules. If that changes without a turn, `begin` has to be called. Turns of
    other clients overtake one that has no room."""

    def __init__(
        self,
        rules: Rules,
        clock: Callable[[], float] = time.monotonic,
        has_room: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self.rules = rules
        self.clock = clock
        self._has_room = has_room
        self._numbers = itertools.count()
        self.waiting: dict[str, list[Turn]] = {}
        self._running: list[Turn] = []
        self.used: dict[str, tuple[float, float]] = {}  # by client: seconds, and when that was counted
        self._most_clients = 64  # in `used`, before those are looked for that may be forgotten
        self._rests_until = -math.inf
        self._end_of_rest: asyncio.TimerHandle | None = None

    @property
    def size(self) -> int:
        """The sizes of the turns that have begun, together."""
        return sum(turn.size for turn in self._running)

    def ask(self, client: str, size: int = 0) -> Turn:
        """Ask for a turn, which may begin at once. It waits, and then lasts, until `leave`. Raises TurnRefusedError if
        too many turns of the client wait."""
        waiting = self.waiting.get(client, [])
        if len(waiting) >= self.rules.places:
            raise TurnRefusedError(f"{len(waiting)} {self.rules.what} of this client wait already; try again later")
        cost = min(MAX_COST, self.rules.seconds * size)
        asked = self.clock()
        turn = Turn(client, size, asked, (cost + AGEING * asked, next(self._numbers)))
        bisect.insort(self.waiting.setdefault(client, waiting), turn, key=ORDER)
        self.begin()
        return turn

    async def enter(self, client: str, size: int = 0, timeout: float | None = None) -> Turn:
        """Wait for a turn. It lasts until `leave`. Raises TurnRefusedError after `timeout` seconds, or if too many
        turns of the client wait."""
        turn = self.ask(client, size)
        if turn.has_begun:
            return turn
        turn.waiter = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([turn.waiter], timeout=timeout)
        except BaseException:
            self.leave(turn)
            raise
        if not turn.has_begun:
            self.leave(turn)
            raise TurnRefusedError(f"{self.rules.what} of others took longer than {timeout:.0f} s; try again later")
        return turn

    async def run(self, client: str, size: int, threads: Executor, function: Callable[[], Result]) -> Result:
        """Wait for a turn, and run a function on a thread. Raises TurnRefusedError, see `ask`."""
        return await self.on_thread(await self.enter(client, size), threads, function)

    def on_thread(self, turn: Turn, threads: Executor, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Start a function on a thread, in a turn that has begun. The turn ends with the function. A caller that is
        cancelled ends neither."""
        loop = asyncio.get_running_loop()
        try:
            running = threads.submit(function)
        except BaseException:  # the server shuts down, or there is no memory for a thread
            self.leave(turn)
            raise
        running.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self.leave, turn))
        return asyncio.wrap_future(running)

    def leave(self, turn: Turn) -> None:
        """The turn is over, or is not wanted any more."""
        if not turn.has_begun:
            self._stop_waiting(turn)
        else:
            now = self.clock()
            self._running.remove(turn)
            self.used[turn.client] = self._lately(turn.client, now) + now - turn.since, now
            if self.rules.rests and (turn.is_heavy or self.is_heavy(turn.client, now)):
                self._rests_until = max(self._rests_until, now + min(now - turn.since, MAX_REST))
            self._forget(now)
        self.begin()

    def begin(self) -> None:
        """Begin the turns for which there is room."""
        while (turn := self._next()) is not None:
            self._stop_waiting(turn)
            turn.has_begun, turn.since = True, self.clock()
            self._running.append(turn)
            if turn.waiter is not None and not turn.waiter.done():
                turn.waiter.set_result(None)

    def is_heavy(self, client: str, now: float) -> bool:
        """Whether the client has used more than it may without waiting for other heavy ones."""
        return self.use(client, now) >= self.rules.free_seconds

    def use(self, client: str, now: float) -> float:
        """Seconds that the client has used lately, with those of its turns that last."""
        return self._lately(client, now) + sum(now - turn.since for turn in self._running if turn.client == client)

    def _stop_waiting(self, turn: Turn) -> None:
        self.waiting[turn.client].remove(turn)
        if not self.waiting[turn.client]:
            del self.waiting[turn.client]

    def _next(self) -> Turn | None:
        """The turn that may begin now."""
        if not self.waiting or len(self._running) >= self.rules.at_once:
            return None
        now, places = self.clock(), list[tuple[float, int, Turn]]()
        for client, (first, *_) in self.waiting.items():
            used = self.use(client, now)
            order, number = first.order
            places.append((min(MAX_USE, used) + order, number, first))
            first.is_heavy = used >= self.rules.free_seconds
        for _, _, turn in sorted(places):
            if turn.is_heavy and not self._heavy_may_begin(turn, now):
                continue
            if self._has_room(turn.size):
                return turn
            # Small ones could take its room for ever. It holds them back in every second span of OVERTAKEN.
            if (now - turn.asked) // OVERTAKEN % 2:
                return None
        return None

    def _heavy_may_begin(self, turn: Turn, now: float) -> bool:
        """A turn that has waited for long waits for no rest: others that become heavy could prolong it for ever."""
        if sum(turn.is_heavy for turn in self._running) >= self.rules.heavy_at_once:
            return False
        left = 0.0 if now - turn.asked >= OVERTAKEN else self._rests_until - now
        if left > 0 and self._end_of_rest is None:
            self._end_of_rest = asyncio.get_running_loop().call_later(left, self._rested)
        return left <= 0

    def _rested(self) -> None:
        self._end_of_rest = None
        self.begin()

    def _lately(self, client: str, now: float) -> float:
        seconds, counted = self.used.get(client, (0.0, now))
        return float(seconds * 0.5 ** ((now - counted) / HALF_LIFE))

    def _forget(self, now: float) -> None:
        """Forget clients whose use is long ago. All are looked at only after their number has doubled."""
        if len(self.used) > self._most_clients:
            for client in [each for each in self.used if self._lately(each, now) < FORGOTTEN]:
                del self.used[client]
            self._most_clients = max(64, 2 * len(self.used))
