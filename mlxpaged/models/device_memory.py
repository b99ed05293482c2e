"""Free memory of the device that runs the model."""

from __future__ import annotations

import mlx.core as mx

from mlxpaged.process_memory import system_free_memory

DESKTOP_SHARE, DESKTOP_LEAST = 0.25, 3 * 2**30
"""What the system and other programs keep of a Mac's memory by default: a quarter of it, and at least 3 GiB. macOS with
a browser takes about that much."""

SYSTEM_SHARE = 0.5
"""Share of the system's free memory that the server takes by default if there is no GPU with a working-set limit."""

CPU_MARGIN = 32 * 2**20
"""Bytes of the system's memory that models on a CPU leave free, for what is not estimated: Python's objects and the
stacks of threads. The kernel kills a process that goes beyond the limit of its container."""

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


def loaded_memory() -> int:
    """Bytes that loaded models take, with their pools. They are free after unloading."""
    return int(mx.get_active_memory())


def unused_memory() -> int:
    """Bytes that the device can take now without another program losing any."""
    return min(free_device_memory(), system_free_memory())


def free_device_memory() -> int:
    """Free bytes on the device that runs the model: of a GPU's working set, or of the system's memory."""
    if mx.metal.is_available():
        limit = int(mx.device_info()["max_recommended_working_set_size"])
        return below_limit(max(0, limit - int(mx.get_active_memory())))
    return below_limit(max(0, system_free_memory() - CPU_MARGIN))
