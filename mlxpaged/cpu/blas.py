"""Gives MLX's CPU backend a fast BLAS, and keeps malloc from returning memory after every operation. Linux only.

MLX's Linux wheel links a reference BLAS (2.6 to 8 GFLOP/s; OpenBLAS reaches over 100). If the system's OpenBLAS is
loaded first (openblas.py), the dynamic linker prefers its symbols. OpenBLAS computes each product on the calling
thread, because streams.py splits work among the cores. MLX's CPU allocator is plain malloc, and glibc maps and unmaps
every large temporary: page faults doubled the time of attention at 16 sequences x 2,000 tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

from mlxpaged.cpu.openblas import BUFFER_BYTES, OPENBLAS, load
from mlxpaged.process_memory import address_space_left, require_memory

M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

REFERENCE = "the reference BLAS of MLX's wheel"
INSTALL = "install OpenBLAS for a many times faster CPU path (Debian, Ubuntu: apt install libopenblas0)"
TOO_LATE = "import mlxpaged before mlx, so that it can load a faster one"

WITH_SMALL_PRODUCTS = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""Routines of OpenBLAS 0.3.17 and newer that compute small products of float32 without packing (kernel/x86_64)."""

loaded: str | None = None
"""The BLAS library in use, with its routines; None for the BLAS of MLX's wheel."""

small_products = False
"""Whether it computes small products without packing their matrices."""

hint = INSTALL
"""How to get a faster one."""


def prepare() -> None:
    """Call it before mlx is imported: after that, OpenBLAS is used only if the process had loaded it before."""
    global loaded, small_products, hint, _reserved
    if sys.platform != "linux":
        return
    late = "mlx.core" in sys.modules
    if late:
        hint = TOO_LATE
    with contextlib.suppress(OSError):
        routines, _reserved = load(only_if_loaded=late)
        loaded = f"OpenBLAS ({routines})" if routines else "OpenBLAS"
        small_products = routines.startswith(WITH_SMALL_PRODUCTS)
        use_threads(1)
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    if address_space_left() is not None:
        # Each thread would map 64 MiB for its own heap, at any time, and a step that runs would lack them.
        mallopt(M_ARENA_MAX, 1)


def use_threads(count: int) -> None:
    """Set OpenBLAS's threads per product. It does nothing if OpenBLAS is not in use.

    mlxpaged uses one; benchmarks use more for mlx-lm's own models, which do not split their work.
    """
    if loaded is not None:
        ctypes.CDLL(OPENBLAS).openblas_set_num_threads(count)


def reserve_buffers(count: int) -> None:
    """Take the work buffers of `count` products at once now. OpenBLAS keeps them for all later products.

    It takes them at the first products otherwise, and tries for ever if an allocation fails (driver/others/memory.c):
    under a limit on the address space the engine thread would not end its step. Raises MemoryError if they do not fit.
    """
    if loaded is None:
        return
    library = ctypes.CDLL(OPENBLAS)
    try:
        allocate, free = library.blas_memory_alloc, library.blas_memory_free
    except AttributeError:  # a build that does not export them
        return
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_int]
    free.restype, free.argtypes = None, [ctypes.c_void_p]
    global _reserved
    missing = count - _reserved
    if missing > 0:
        require_memory(missing * BUFFER_BYTES, "the work buffers of OpenBLAS")
        for buffer in [allocate(0) for _ in range(count)]:
            free(buffer)
        _reserved = count


_reserved = 0


def describe() -> str:
    """One line for the start-up log."""
    if sys.platform != "linux":
        return "Accelerate"
    return loaded or f"{REFERENCE}; {hint}"
