"""How much memory the system has free, and which errors mean that an allocation failed. Nothing here imports mlx."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
from pathlib import Path, PurePosixPath

FAILED_ALLOCATIONS = (
    "unable to allocate",  # MLX on a GPU: "[malloc] Unable to allocate N bytes."
    "resource limit",  # too many buffers: "[metal::malloc] Resource limit (499000) exceeded."
    "insufficient memory",  # Metal, of a command buffer
    "std::bad_alloc",
    "cannot allocate memory",  # ENOMEM as other libraries report it
    "can't start new thread",  # there is no room for its stack
)
"""Parts of the messages of RuntimeErrors, in lower case: neither MLX nor Python has a type for them."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in FAILED_ALLOCATIONS):
            return True
        error = error.__cause__
    return False


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


def resident_bytes() -> int:
    """Memory of this process that is not swapped out. On a Mac, what only the GPU uses may be missing."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def system_free_memory() -> int:
    """Free bytes of the machine, or of the control group that the process runs in if that has less."""
    import psutil  # it takes 20 ms, and `--help` does without it

    free = int(psutil.virtual_memory().available)  # macOS: free pages, and those that no program used lately
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
