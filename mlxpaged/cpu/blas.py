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

from mlxpaged.cpu.openblas import OPENBLAS, load

M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
M_MMAP_THRESHOLD = -3

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
    global loaded, small_products, hint
    if sys.platform != "linux":
        return
    late = "mlx.core" in sys.modules
    if late:
        hint = TOO_LATE
    with contextlib.suppress(OSError):
        routines = load(only_if_loaded=late)
        loaded = f"OpenBLAS ({routines})" if routines else "OpenBLAS"
        small_products = routines.startswith(WITH_SMALL_PRODUCTS)
        use_threads(1)
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def use_threads(count: int) -> None:
    """Set OpenBLAS's threads per product. It does nothing if OpenBLAS is not in use.

    mlxpaged uses one; benchmarks use more for mlx-lm's own models, which do not split their work.
    """
    if loaded is not None:
        ctypes.CDLL(OPENBLAS).openblas_set_num_threads(count)


def describe() -> str:
    """One line for the start-up log."""
    if sys.platform != "linux":
        return "Accelerate"
    return loaded or f"{REFERENCE}; {hint}"
