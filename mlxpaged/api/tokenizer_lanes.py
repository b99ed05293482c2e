"""Runs tokenizers and chat templates on threads. A tokenizer does one thing at a time for short texts, and one for long
ones: a client's short prompt waits neither for another's megabytes, nor for a template of another model that loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakKeyDictionary

from mlxpaged.api.turns import Rules, Turns
from mlxpaged.models.text.tokenizer import Tokenizer

Result = TypeVar("Result")

LONG_TEXT = 64 * 1024
"""Characters, or tokens, from which on a text is long. Tokenizing them takes 20 to 100 ms."""
TEXTS = Rules("texts", at_once=1, places=256, seconds=1e-6)
"""Each lane has these rules. The size of a turn is that of its text."""


class Lanes:
    """Lanes of a tokenizer: for short texts and for long ones, with a thread each, which starts when it is needed. So a
    text that takes hours holds no thread of another tokenizer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.short, self.long = Turns(TEXTS, clock), Turns(TEXTS, clock)
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="mlxpaged-tokenizer")


class TokenizerLanes:
    """clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lanes: WeakKeyDictionary[Tokenizer, Lanes] = WeakKeyDictionary()  # the threads end with their tokenizer

    async def run(self, client: str, tokenizer: Tokenizer, size: int, function: Callable[[], Result]) -> Result:
        """Run a function that uses this tokenizer. size: characters or tokens that it works on. Raises
        TurnRefusedError."""
        lanes = self.lanes.get(tokenizer) or self.lanes.setdefault(tokenizer, Lanes(self._clock))
        turns = lanes.long if size >= LONG_TEXT and tokenizer.is_thread_safe else lanes.short
        return await turns.run(client, size, lanes.threads, function)

    def close(self) -> None:
        for lanes in self.lanes.values():
            lanes.threads.shutdown(wait=False, cancel_futures=True)
