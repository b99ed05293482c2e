"""Free memory of the device that runs the model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import mlx.core as mx

from mlxpaged.process_memory import address_space_left

DESKTOP_SHARE, DESKTOP_LEAST = 0.25, 3 * 2**30
"""What the system and other programs keep of a Mac's memory by default: a quarter of it, and at least 3 GiB. macOS with
a browser takes about that much."""

SYSTEM_SHARE = 0.5
"""Share of the system's free memory that the server takes by default if there is no GPU with a working-set limit."""


_limit: int | None = None


def limit_memory(limit: int | None) -> None:
    """Let all models together take at most so many bytes; None: no limit. It holds for the process, as MLX's own
    allocator does."""
    global _limit
    _limit = limit


def below_limit(free: int) -> int:
    """Free bytes, or those that the limit leaves if that is less."""
    return free if _limit is None else max(0, min(free, _limit - int(mx.get_active_memory())))


def default_working_set(total: int, working_set: int) -> int:
    """Bytes of a Mac that the whole server takes by default. total: of the machine. working_set: the GPU's limit."""
    return max(0, min(working_set, total - max(DESKTOP_LEAST, int(DESKTOP_SHARE * total))))


def default_device_memory() -> int:
    """Free bytes that the server takes by default, so that the machine stays usable."""
    if mx.metal.is_available():
        info = mx.device_info()
        total, limit = int(info["memory_size"]), int(info["max_recommended_working_set_size"])
        return below_limit(max(0, default_working_set(total, limit) - int(mx.get_active_memory())))
    return below_limit(int(SYSTEM_SHARE * system_free_memory()))


def unused_memory() -> int:
    """Bytes that the device can take now without another program losing any."""
    return min(free_device_memory(), system_free_memory())


def free_device_memory() -> int:
    """Free bytes on the device that runs the model: of a GPU's working set, or of the system's memory."""
    if mx.metal.is_available():
        limit = int(mx.device_info()["max_recommended_working_set_size"])
        return below_limit(max(0, limit - int(mx.get_active_memory())))
    return below_limit(system_free_memory())


CGROUP_MEMORY = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A container's memory in cgroup versions 2 and 1: directory, files of the limit and of the use, and the field of
memory.stat that counts the cached file pages among it. The kernel drops these before it refuses memory."""


OWN_CGROUPS = Path("/proc/self/cgroup")


def system_free_memory() -> int:
    """Free bytes of the machine, or of the control group that the process runs in, or what the limit on its address
    space leaves."""
    free = machine_free_memory()
    if (left := address_space_left()) is not None:
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


def machine_free_memory() -> int:
    if sys.platform == "linux":
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            run = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True, timeout=5)
            return free_in_vm_stat(run.stdout)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_in_vm_stat(text: str) -> int:
    """Bytes of free pages, and of those that macOS reuses at once because no program used them lately. The sum is
    psutil's `available`. text: vm_stat's output. Raises ValueError for any other text."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = [
        re.search(rf"^Pages {kind}:\s+(\d+)\.", text, re.MULTILINE) for kind in ("free", "inactive", "speculative")
    ]
    if size is None or None in pages:
        raise ValueError(f"not the output of vm_stat: {text[:80]!r}")
    return int(size[1]) * sum(int(count[1]) for count in pages if count)
