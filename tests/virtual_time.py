"""An event loop whose clock jumps to the next timer: what takes minutes is over at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Timeless(selectors.DefaultSelector):
    """Waits for nothing but the clock, which jumps to the time of the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def run(work: Callable[[asyncio.AbstractEventLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run what a function of the loop returns. `loop.time()` is the clock."""
    selector = Timeless()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()
