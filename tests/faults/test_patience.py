"""What hangs is told from what is slow because other programs have the cores."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time

import pytest

from tests.faults import patience
from tests.faults.patience import Delays, processor_seconds, thread_delays, within


async def late(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


def test_what_does_not_end_in_time_is_cancelled() -> None:
    async def run() -> None:
        task = asyncio.ensure_future(late(60))
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, lambda: 0.0, task)
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())


def test_a_wait_for_cores_is_added_to_the_limit() -> None:
    delays = itertools.chain([7.0], itertools.repeat(67.0))
    assert asyncio.run(within(0.01, lambda: next(delays), late(0.05))) == "answer"


def test_an_error_of_what_is_waited_for_is_raised() -> None:
    async def fail() -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        asyncio.run(within(60.0, lambda: 0.0, fail()))


def test_a_cancel_ends_the_wait() -> None:
    async def run() -> None:
        waiting = asyncio.ensure_future(within(60.0, lambda: 0.0, late(60)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited for a core")
def test_the_sum_of_delays_does_not_sink_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.0)
    assert thread_delays(os.getpid())
    delays = Delays()
    first = delays.of(os.getpid())
    second = delays.of(os.getpid())
    assert first <= second < first + 60
    assert delays.of(2**22 + 1) == second


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_work_of_a_process_and_of_its_children_counts_and_their_sleep_does_not() -> None:
    work = "import time\nwhile time.process_time() < {}: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", work.format(0.5)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        running = processor_seconds(os.getpid())
        assert running - time.process_time() >= 0.4
        assert processor_seconds(child.pid) >= 0.4
        child.stdin.write("\n")
    assert processor_seconds(os.getpid()) >= running - 0.05, "what a child has used is kept after its end"
    assert processor_seconds(2**22 + 1) == 0.0
