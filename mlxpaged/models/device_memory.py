"""Free memory of the device that runs the model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mlx.core as mx


def free_device_memory() -> int:
    """Free bytes on the device that runs the model: of a GPU's working set, or of the system's memory."""
    if mx.metal.is_available():
        limit = int(mx.device_info()["max_recommended_working_set_size"])
        return max(0, limit - int(mx.get_active_memory()))
    return system_free_memory()


CGROUP_MEMORY = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, in cgroup versions 2 and 1."""


def system_free_memory() -> int:
    """Free bytes of the machine, or of the container that the process runs in."""
    free = machine_free_memory()
    for limit, used in CGROUP_MEMORY:
        try:
            free = min(free, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # no such file, or "max" for no limit
            continue
    return free


def machine_free_memory() -> int:
    if sys.platform == "linux":
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
