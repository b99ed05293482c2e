"""The watchdog's limits and its exit, and the clock that leaves out the time in which the process did not run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mlxpaged.core.engine.stall import StepSize, Work
from mlxpaged.core.scheduling.step_cost import MIN_PROMPT_STEPS, StepCost
from mlxpaged.engine import watchdog
from mlxpaged.engine.awake_clock import LONGEST_GAP, AwakeClock
from mlxpaged.engine.engine_thread import Activity, EngineThread
from mlxpaged.engine.watchdog import FACTOR, LEAST_SECONDS, LOAD_SECONDS, UNKNOWN_SECONDS, StallLimits, Watchdog
from tests.api.helpers import DEADLINE, FakeClock
from tests.support import wait_until


@pytest.mark.parametrize(
    ("step_timeout", "work", "seconds", "expected"),
    [
        (None, Work.STEP, 0.01, LEAST_SECONDS),
        (None, Work.STEP, 10.0, FACTOR * 10),
        (None, Work.STEP, None, UNKNOWN_SECONDS),
        (None, Work.COMMANDS, None, UNKNOWN_SECONDS),
        (None, Work.LOAD, None, LOAD_SECONDS),
        (5.0, Work.STEP, 10.0, 5.0),
        (5.0, Work.LOAD, None, LOAD_SECONDS),
        (math.inf, Work.STEP, 0.01, math.inf),
        (math.inf, Work.LOAD, None, math.inf),
    ],
)
def test_the_limit_of_a_step_follows_its_estimate_unless_a_flag_sets_it(
    step_timeout: float | None, work: Work, seconds: float | None, expected: float
) -> None:
    assert StallLimits(step_timeout).limit(work, StepSize(1, 1, seconds)) == expected


def test_a_step_is_estimated_only_as_far_as_the_steps_before_tell() -> None:
    cost = StepCost()
    for i in range(MIN_PROMPT_STEPS):
        assert cost.expected_seconds([], [(0, 100)]) is None, f"{i} steps with prompts are too few"
        cost.observe([], [(0, 100 + i)], 0.01 * (100 + i))
        cost.costs()
    assert cost.expected_seconds([], [(0, 200)]) == pytest.approx(2.0, rel=0.1)
    assert cost.expected_seconds([], [(0, 2000)]) is None
    assert cost.expected_seconds([9000], []) is None


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_process_ends_only_if_the_stall_lasts(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.01)
    noticed = threading.Event()
    monkeypatch.setattr(watchdog, "dump_stacks", noticed.set)
    clock, thread, ended = FakeClock(), EngineThread(), list[int]()

    def on_stall(stall: object) -> None:
        assert thread.stall is stall, "the receiver of the notice must find it"
        if goes_on:
            thread.activity = None

    dog = Watchdog(thread, StallLimits(1.0, exits=True), clock, on_stall, ended.append)
    thread.activity = Activity(Work.COMMANDS, None, clock())
    dog.start()
    clock.advance(2)
    assert noticed.wait(DEADLINE)
    wait_until(lambda: "mlxpaged-exit" not in [each.name for each in threading.enumerate()])
    dog.end()
    dog.join(DEADLINE)
    assert ended == ([] if goes_on else [watchdog.STALLED_STATUS])


def test_the_clock_leaves_out_gaps_and_steps_back() -> None:
    system = FakeClock()
    clock = AwakeClock(system)
    start = clock()
    for seconds, counted in ((1.0, 1.0), (LONGEST_GAP, LONGEST_GAP), (3600.0, 0.0), (-500.0, 0.0), (0.25, 0.25)):
        system.advance(seconds)
        now = clock()
        assert now - start == pytest.approx(counted)
        start = now


STOPPED = """
import threading, time
from mlxpaged.engine import awake_clock
awake_clock.LONGEST_GAP = 0.2
clock, ended = awake_clock.AwakeClock(), threading.Event()
def beat():
    while not ended.wait(0.02):
        clock()
threading.Thread(target=beat, daemon=True).start()
before = time.monotonic(), clock()
print("ready", flush=True)
input()
counted = clock() - before[1]
print(time.monotonic() - before[0], counted, flush=True)
"""


def test_the_time_in_which_the_process_was_stopped_does_not_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        time.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        passed, counted = map(float, process.stdout.readline().split())
    assert passed > 0.4
    assert counted < passed - 0.4
