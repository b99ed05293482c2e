"""Elementwise work on all of a CPU's cores.

MLX's CPU runs the operations of a stream on one thread, and of those only the BLAS's products use several. Where an
operation takes long by its elements, halves of them on two streams take little more than half of the time: powers of
two of 400,000 scores 1.65 ms on one stream, 0.97 on two. Products stay on one stream: two at once, of several threads
each, hold each other up.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from contextlib import AbstractContextManager

import mlx.core as mx

LEAST_ELEMENTS = 25_000
"""Of a lane: 0.1 ms of powers. A lane costs some 0.03 ms, to hand its work over and to wait for it."""
MOST_LANES = 4


class _Streams(threading.local):
    """Those beside the default stream. A stream belongs to the thread that made it; MLX keeps both to the process's
    end, so an engine that is started again leaves as many threads behind as it had streams."""

    def __init__(self) -> None:
        self.made: list[mx.Stream] = []


_streams = _Streams()


def lanes(length: int, elements: int) -> list[tuple[slice, AbstractContextManager[object]]]:
    """Shares of an axis of `length`, as equal as can be, of an array with so many elements: MLX operations on a share
    run on its lane inside of `with`. On a GPU there is one.
    """
    count = min(length, elements // LEAST_ELEMENTS, MOST_LANES, cores())
    if count < 2 or mx.default_device() != mx.Device(mx.cpu):
        return [(slice(length), contextlib.nullcontext())]
    while len(_streams.made) < count - 1:
        _streams.made.append(mx.new_stream(mx.Device(mx.cpu)))
    ends = [length * i // count for i in range(count + 1)]
    shares = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    others = [(share, mx.stream(stream)) for share, stream in zip(shares, _streams.made, strict=False)]
    return [*others[: count - 1], (shares[-1], contextlib.nullcontext())]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
