"""How glibc's malloc, MLX's allocator on a CPU, treats freed memory. Linux only.

By default, glibc maps and unmaps every large temporary: page faults doubled the time of attention at 16 sequences x
2,000 tokens. So blas.py lets malloc keep it. What is freed while a model loads is no temporary: each layer's weights
are replaced by others, and the heap of a thread does not take what another one has freed. Weights therefore get
mappings of their own, which are gone when they are freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator

from mlxpaged.process_memory import return_freed_memory

M_MMAP_THRESHOLD = -3  # from glibc's malloc.h

KEPT = 1 << 30
"""Bytes of an array from which on it has a mapping of its own, while steps run."""

MAPPED = 1 << 18
"""The same while a model loads: less than a matrix of a real model has."""

_lock = threading.Lock()
_loads = 0


@contextlib.contextmanager
def returning_freed_memory() -> Iterator[None]:
    """While a model loads in it, large freed arrays are given back to the system at once, and at its end all that is
    free. Steps of other models are slower meanwhile."""
    count(1)
    try:
        yield
    finally:
        count(-1)
        return_freed_memory()


def count(change: int) -> None:
    """Count the loads, and set the threshold when the first one begins and when the last one ends."""
    global _loads
    with _lock:
        _loads += change
        if sys.platform == "linux" and _loads == max(0, change):
            with contextlib.suppress(AttributeError):  # not glibc
                ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT if change < 0 else MAPPED)
