"""What the system and the limits of the process leave of memory, and which errors mean that an allocation failed.

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
from pathlib import Path, PurePosixPath

STATM = Path("/proc/self/statm")
"""Its first field is the size of the address space, in pages (proc(5))."""

UNLIMITED = 2**63
"""Bytes of an address space without a limit."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MARGIN = 32 * 2**20
"""Bytes that are left free for what is not estimated: Python's objects, and the stacks of new threads (8 MiB each)."""

STACK_BYTES = 8 * 2**20
"""Bytes of a new thread's stack. If less is left of the address space, nothing is granted."""

FAILED_ALLOCATIONS = (
    "unable to allocate",  # MLX on a GPU: "[malloc] Unable to allocate N bytes."
    "resource limit",  # too many buffers: "[metal::malloc] Resource limit (499000) exceeded."
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


def can_allocate(nbytes: int) -> bool:
    """Whether malloc finds so many bytes in one piece, under a limit on the address space, and leaves MARGIN of it, or
    STACK_BYTES if the piece was mapped before. It takes 30 us."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    before = address_space_left()
    block = libc.malloc(nbytes)
    if block is None:
        return False
    after = address_space_left()
    libc.free(block)
    return before is None or after is None or after >= (MARGIN if after < before else STACK_BYTES)


def return_freed_memory() -> None:
    """Let malloc return what it can of freed memory to the system. glibc only."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


CGROUP_MEMORY = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A container's memory in cgroup versions 2 and 1: directory, files of the limit and of the use, and the field of
memory.stat that counts the cached file pages among it. The kernel drops these before it refuses memory."""


OWN_CGROUPS = Path("/proc/self/cgroup")


def system_free_memory(left: int | None = None) -> int:
    """Free bytes of the machine, or of the control group that the process runs in, or what the limit on its address
    space leaves. left: that, if it is known; UNLIMITED to leave it out."""
    import psutil  # it takes 20 ms, and `--help` does without it

    free = int(psutil.virtual_memory().available)  # macOS: free pages, and those that no program used lately
    if left is None:
        left = address_space_left()
    if left is not None:
        free = min(free, left)
    groups = own_groups()
    for root, *names, field in CGROUP_MEMORY:
        for directory in (root, *(root / group for group in groups)):
            try:
                limit, used = (int((directory / name).read_text()) for name in names)
                counts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
                free = min(free, max(0, limit - used + int(counts.get(field, 0))))
            except (OSError, ValueError):  # no such file, or "max" for no limit
                continue
    return free


def own_groups() -> set[str]:
    """The control groups for memory that the process is in, and their parents, relative to the root. A container sees
    its own as the root; a service of systemd with MemoryMax= does not."""
    found = set()
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                group = PurePosixPath(path.lstrip("/"))
                found |= {str(each) for each in (group, *group.parents) if each.parts and ".." not in each.parts}
    return found


def require_memory(nbytes: int, what: str) -> None:
    """Raises MemoryError if less than `nbytes` and MARGIN are free. what: needs it. Only Linux is asked, because a Mac
    has no such limits. The machine's memory and control groups are asked only for much, because that takes 0.1 ms."""
    left = address_space_left()
    if left is not None and STACK_BYTES <= left < nbytes + MARGIN:
        left += reusable_bytes()
    if sys.platform == "linux" and nbytes >= MARGIN:
        left = system_free_memory(left)
    if left is not None and left < nbytes + MARGIN:
        free = max(0, left - MARGIN)
        raise MemoryError(f"{what} may take {nbytes / 1e6:.1f} MB, but only {free / 1e6:.1f} MB are free")
