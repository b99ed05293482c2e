"""What the limit on the process's address space leaves, and which errors mean that an allocation failed.

Nothing here imports mlx. MLX's CPU allocator does not check what malloc returns (mlx/backend/no_gpu/allocator.cpp of
0.32): it ends the process by a segmentation fault. Libraries in Rust abort. So memory is asked for before they need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Its first field is the size of the address space, in pages (proc(5))."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MARGIN = 32 * 2**20
"""Bytes that are left free for what is not estimated: Python's objects, and the stacks of new threads (8 MiB each)."""

FAILED_ALLOCATIONS = (
    "unable to allocate",  # MLX on a GPU: "[malloc] Unable to allocate N bytes."
    "insufficient memory",  # Metal, of a command buffer
    "std::bad_alloc",
    "cannot allocate memory",  # ENOMEM as other libraries report it
    "can't start new thread",  # there is no room for its stack
)
"""Parts of the messages of RuntimeErrors, in lower case: neither MLX nor Python has a type for them."""


COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks")
"""The fields of Mallinfo2 before `fordblks`."""


class Mallinfo2(ctypes.Structure):
    """glibc's malloc/malloc.h. fordblks: free bytes in malloc's heaps."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*COUNTS, "fordblks", "keepcost"))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in FAILED_ALLOCATIONS):
            return True
        error = error.__cause__
    return False


def address_space_left() -> int | None:
    """Bytes that the process may still map (`ulimit -v`); None without a limit. It takes 10 us with one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if sys.platform != "linux" or limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - int(STATM.read_text().split()[0]) * PAGE_BYTES)


def reusable_bytes() -> int:
    """Bytes that malloc has mapped and that are free. 0 if the C library does not tell: glibc does since 2.33."""
    if sys.platform != "linux":
        return 0
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = Mallinfo2
    return int(mallinfo2().fordblks)


def return_freed_memory() -> None:
    """Let malloc return what it can of freed memory to the system. glibc only."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def require_memory(nbytes: int, what: str) -> None:
    """Raises MemoryError if the limit on the address space leaves less than `nbytes` and MARGIN. what: needs it."""
    left = address_space_left()
    if left is None or left >= nbytes + MARGIN:
        return
    left += reusable_bytes()
    if left < nbytes + MARGIN:
        raise MemoryError(
            f"{what} may take {nbytes / 1e6:.1f} MB, but the limit on the address space leaves only "
            f"{max(0, left - MARGIN) / 1e6:.1f} MB"
        )
