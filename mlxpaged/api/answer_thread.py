"""The thread on which large answers are rendered, and its rests.

A thread that waits for the interpreter lock gets it after 5 ms, unless the holder leaves it before, and a step waits
for it many times. So this thread leaves it after each half a millisecond of work, for as long as the others take to
notice. While 7 MB are rendered, twenty short evaluations of MLX take 2 ms instead of 6, and the rendering twice as
long.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WORK_SECONDS, REST_SECONDS = 0.0005, 0.0001

Result = TypeVar("Result")


class Work(threading.local):
    """since: when the work after the last rest began, on this thread; None on all others."""

    since: float | None = None


_work = Work()


def give_way() -> None:
    """Rest if it is time to. Called often while an answer is rendered; it does nothing on other threads."""
    if _work.since is not None and time.perf_counter() - _work.since > WORK_SECONDS:
        time.sleep(REST_SECONDS)
        _work.since = time.perf_counter()


class AnswerThread:
    """One answer is rendered at a time: several threads would take turns with the lock, each for 5 ms."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlxpaged-answer")

    async def run(self, function: Callable[[], Result]) -> Result:
        def work() -> Result:
            _work.since = time.perf_counter()
            return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
