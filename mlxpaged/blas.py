"""Linux only: give MLX's CPU backend a fast BLAS and memory that is not returned to the system after every operation.

MLX's Linux wheel links a reference BLAS (2.6 to 8 GFLOP/s where OpenBLAS does over 100). Loading the system's OpenBLAS
first makes the dynamic linker prefer its symbols. Its threads stay awake for 20 ms after a product and ask for another,
on cores that MLX's other operations and the server's other threads could use; they are told to sleep at once. MLX's CPU
allocator is plain malloc, and glibc maps and unmaps every large temporary: page faults doubled the time of attention at
16 sequences x 2,000 tokens.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

M_TRIM_THRESHOLD = -1  # from glibc's malloc.h
M_MMAP_THRESHOLD = -3

OPENBLAS = "libopenblas.so.0"
SLEEP_AT_ONCE = ("OPENBLAS_THREAD_TIMEOUT", "10")
"""Looked up as it is loaded. The base-2 logarithm of the processor's ticks that a thread waits awake; 26 by default."""
REFERENCE = "the reference BLAS of MLX's wheel"
INSTALL = "install OpenBLAS for a many times faster CPU path (Debian, Ubuntu: apt install libopenblas0)"
TOO_LATE = "mlx was imported before mlxpaged, which could have loaded a faster one first"

loaded: str | None = None
"""The BLAS library in use, with its routines; None for the one inside MLX's wheel."""

hint = INSTALL
"""What to do where that is slow."""


def prepare() -> None:
    """Once mlx is imported in the process, it has its BLAS: then OpenBLAS is in use only if it was there before."""
    global loaded, hint
    if sys.platform != "linux":
        return
    late = "mlx.core" in sys.modules
    if late:
        hint = TOO_LATE
    os.environ.setdefault(*SLEEP_AT_ONCE)
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL | (os.RTLD_NOLOAD if late else 0))
        loaded = f"OpenBLAS{routines(library)}"
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # not glibc
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def routines(openblas: ctypes.CDLL) -> str:
    """The processor that its routines are made for: one without AVX-512 halves the speed of a machine that has it."""
    try:
        core_name = openblas.openblas_get_corename
    except AttributeError:
        return ""
    core_name.restype = ctypes.c_char_p
    return f" ({core_name().decode()})"


def describe() -> str:
    """One line for the start-up log."""
    if sys.platform != "linux":
        return "Accelerate"
    return loaded or f"{REFERENCE}; {hint}"
