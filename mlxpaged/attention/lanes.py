"""One operation's work on all of a CPU's cores.

MLX's CPU runs the operations of a stream on one thread. Parts of an operation on as many streams as there are cores
take little more than their share of the time: the reason why no library below has to use several threads by itself
(mlxpaged/cpu/blas.py), which for the few rows of a decode step none of them does well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

Part = TypeVar("Part")

HAND_OVER = 45e-6
"""Seconds that a lane costs, to hand its work over and to wait for it."""

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Of a container, under Linux's second version of control groups."""


class Lane:
    """MLX operations that are made inside of `with` run on this lane; there no others begin."""

    def __init__(self, stream: mx.Stream | None) -> None:
        """None: the stream that is current anyway."""
        self.stream = stream
        self._on = contextlib.nullcontext() if stream is None else mx.stream(stream)

    def __enter__(self) -> None:
        _local.inside = True
        self._on.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._on.__exit__(*error)
        _local.inside = False


class _Local(threading.local):
    """lanes: those beside the current stream. A stream belongs to the thread that made it; MLX keeps both to the
    process's end, so an engine that is started again leaves as many threads behind as it had streams. inside: whether
    operations are being made for a lane."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.own = Lane(None)
        self.inside = False


_local = _Local()


def count(seconds: float) -> int:
    """How many lanes suit work that takes so long on one core: n of them take `seconds / n + n * HAND_OVER`, which is
    least where n is the square root of `seconds / HAND_OVER`. On a GPU, and within a lane, one."""
    if seconds < 4 * HAND_OVER or _local.inside or mx.default_device() != mx.Device(mx.cpu):
        return 1
    return min(cores(), int(math.sqrt(seconds / HAND_OVER)))


def contexts(number: int) -> Sequence[AbstractContextManager[None]]:
    """Of so many lanes, the last of which is the current stream. Within a lane, all are."""
    if number == 1 or _local.inside:
        return [contextlib.nullcontext()] * number
    while len(_local.lanes) < number - 1:
        _local.lanes.append(Lane(mx.new_stream(mx.Device(mx.cpu))))
    return [*_local.lanes[: number - 1], _local.own]


def shares(length: int, seconds: float, unit: int = 1) -> list[slice]:
    """Of an axis of `length`, in whole units but for the last: one for each lane that suits work of so many seconds.

    The last lane's is larger by what takes HAND_OVER, where that is a unit, for the others begin that much later.
    """
    number = max(1, min(length // unit, count(seconds)))
    if number == 1:
        return [slice(0, length)]
    other = length / number * (1 - HAND_OVER / seconds)
    ends = [*(unit * round(i * other / unit) for i in range(number)), length]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def assign(parts: Sequence[Part]) -> list[tuple[Part, AbstractContextManager[None]]]:
    """Each part with the lane it is computed on."""
    return list(zip(parts, contexts(len(parts)), strict=True))


def settle() -> None:
    """Wait for this thread's lanes, whatever became of their work: MLX keeps an error in the stream it happened on, and
    fails whatever comes there later, until somebody has waited for that stream."""
    for lane in _local.lanes:
        with contextlib.suppress(Exception):
            mx.synchronize(lane.stream)


def cores() -> int:
    """That this process may use, and has the time of."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return int(min(len(os.sched_getaffinity(0)), max(1, quota())))


@functools.cache
def quota(limits: Path = CPU_MAX) -> float:
    """Cores' worth of time that a container has."""
    try:
        microseconds, period = limits.read_text().split()
        return int(microseconds) / int(period)
    except (OSError, ValueError):  # no such limits here, or "max"
        return math.inf
