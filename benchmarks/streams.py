"""The inter-token times of streams in this process, alone and beside another request."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams


def gaps(core: EngineCore, streams: int, is_done: Callable[[], bool]) -> list[list[float]]:
    """The times of each step, until a condition holds between two steps. It is asked first when all streams run."""
    params = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    for i in range(streams):
        core.add(Request(f"stream {i}", [20 + i, 5, 6, 7], params, core.clock()))
    last: dict[str, float] = {}
    for _ in range(20):
        last.update((output.request_id, output.time) for output in core.step())
    found: list[list[float]] = []
    while not is_done():
        found.append([])
        for output in core.step():
            for _ in output.token_ids if output.request_id in last else ():
                found[-1].append(output.time - last[output.request_id])
                last[output.request_id] = output.time
    core.abort_all("measured")
    core.finish_step()
    return found


def ends_after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since the first call."""
    start: list[float] = []

    def is_done() -> bool:
        start.append(time.monotonic())
        return start[-1] > start[0] + seconds

    return is_done


def once_added(core: EngineCore, request: Request, is_done: Callable[[], bool]) -> Callable[[], bool]:
    """Adds a request of one token at the first call. Then returns whether a condition holds."""
    asked = False

    def is_done_after() -> bool:
        nonlocal asked
        if not asked:
            core.add(request)
            asked = True
        return is_done()

    return is_done_after


def print_gaps(alone: list[list[float]], beside: list[list[float]], name: str) -> None:
    """name: what the streams run beside."""
    print(f"{'inter-token ms':24} {'p50':>8} {'p99':>8}")
    p99 = []
    for label, steps in (("alone", alone), (name, beside)):
        times = list(itertools.chain(*steps))
        p99.append(np.percentile(times, 99))
        print(f"{label:24} {1e3 * np.percentile(times, 50):8.1f} {1e3 * p99[-1]:8.1f}")
    print(f"ratio of p99 {p99[1] / p99[0]:.2f}")
