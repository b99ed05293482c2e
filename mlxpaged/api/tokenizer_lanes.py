"""Runs tokenizers and chat templates on threads. A tokenizer does one thing at a time for short texts, and one for long
ones: a client's short prompt waits neither for another's megabytes, nor for a template of another model that loops."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakKeyDictionary

from mlxpaged.models.tokenizer import Tokenizer

Result = TypeVar("Result")

LONG_TEXT = 64 * 1024
"""Characters, or tokens, from which on a text is long. Tokenizing them takes 20 to 100 ms."""


class Lane:
    """One function at a time. When it ends, the one with the shortest text of those that wait is next."""

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # size, number, turn
        self._numbers = itertools.count()

    async def enter(self, size: int) -> None:
        if not self._is_busy:
            self._is_busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False


class Lanes:
    """Lanes of a tokenizer: for short texts and for long ones, with a thread each, which starts when it is needed. So a
    text that takes hours holds no thread of another tokenizer."""

    def __init__(self) -> None:
        self.short, self.long = Lane(), Lane()
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="mlxpaged-tokenizer")


class TokenizerLanes:
    def __init__(self) -> None:
        self._lanes: WeakKeyDictionary[Tokenizer, Lanes] = WeakKeyDictionary()  # the threads end with their tokenizer

    async def run(self, tokenizer: Tokenizer, size: int, function: Callable[[], Result]) -> Result:
        """Run a function that uses this tokenizer. size: characters or tokens that it works on."""
        loop = asyncio.get_running_loop()
        lanes = self._lanes.get(tokenizer) or self._lanes.setdefault(tokenizer, Lanes())
        lane = lanes.long if size >= LONG_TEXT and tokenizer.is_thread_safe else lanes.short
        await lane.enter(size)
        try:
            running: Future[Result] = lanes.threads.submit(function)
        except BaseException:  # the server shuts down, or there is no memory for a thread
            lane.leave()
            raise
        # A caller that is cancelled does not end the function: the lane is busy until it ends by itself.
        running.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(lane.leave))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        for lanes in self._lanes.values():
            lanes.threads.shutdown(wait=False, cancel_futures=True)
