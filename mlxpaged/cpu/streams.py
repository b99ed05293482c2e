"""CPU streams: MLX runs the operations of one CPU stream on one thread, so work for all cores is split among streams.

OpenBLAS therefore uses one thread per product (blas.py). No library uses several threads well for the few rows of a
decode step.
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

HANDOFF = 45e-6
"""Seconds that one more stream costs: to give it work and to wait for it."""

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The CPU limit of a container, in version 2 of Linux control groups."""


class Stream:
    """Inside `with`, operations run on this stream, and work is not split again."""

    def __init__(self, stream: mx.Stream | None) -> None:
        """stream: None for the current stream."""
        self.stream = stream
        self._context = contextlib.nullcontext() if stream is None else mx.stream(stream)

    def __enter__(self) -> None:
        _local.inside = True
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        _local.inside = False


class _Local(threading.local):
    """Streams belong to the thread that made them. MLX keeps them until the process ends."""

    def __init__(self) -> None:
        self.others: list[Stream] = []
        self.current = Stream(None)
        self.inside = False


_local = _Local()


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def count(seconds: float) -> int:
    """The number of streams for work that takes `seconds` on one core. n streams take `seconds / n + n * HANDOFF`,
    which is least at n = sqrt(seconds / HANDOFF). It is 1 on a GPU and inside a stream."""
    if seconds < 4 * HANDOFF or _local.inside or not on_cpu():
        return 1
    return min(cores(), int(math.sqrt(seconds / HANDOFF)))


def split(length: int, seconds: float, unit: int = 1) -> list[slice]:
    """Parts of an axis, one per stream, for work that takes `seconds` on one core; all but the last are multiples of
    `unit`. The last part runs on the current stream, which starts HANDOFF earlier, and is larger by that much."""
    number = max(1, min(length // unit, count(seconds)))
    if number == 1:
        return [slice(0, length)]
    other = length / number * (1 - HANDOFF / seconds)
    ends = [*(unit * round(i * other / unit) for i in range(number)), length]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def assign(parts: Sequence[Part]) -> list[tuple[Part, AbstractContextManager[None]]]:
    """Each part with the context of the stream that computes it. The last is the current stream."""
    if len(parts) == 1 or _local.inside:
        return [(part, contextlib.nullcontext()) for part in parts]
    while len(_local.others) < len(parts) - 1:
        _local.others.append(Stream(mx.new_stream(mx.Device(mx.cpu))))
    return list(zip(parts, [*_local.others[: len(parts) - 1], _local.current], strict=True))


def synchronize() -> None:
    """Wait for this thread's CPU streams and drop their errors.

    MLX keeps an error in the stream where it happened, and raises it in all later work of that stream until the stream
    is waited for.
    """
    for other in _local.others:
        with contextlib.suppress(Exception):
            mx.synchronize(other.stream)


def cores() -> int:
    """Cores that this process may use, by affinity and by the container's limit."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    return int(min(len(os.sched_getaffinity(0)), max(1, container_cpus())))


@functools.cache
def container_cpus(limits: Path = CPU_MAX) -> float:
    """The container's CPU limit in cores; infinity if there is none."""
    try:
        microseconds, period = limits.read_text().split()
        return int(microseconds) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return math.inf
