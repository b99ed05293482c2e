"""Asks the operating system whether it is short of memory. Nothing here imports mlx."""

from __future__ import annotations

import ctypes
import sys
from enum import IntEnum
from pathlib import Path

PSI = Path("/proc/pressure/memory")
"""Linux's pressure stall information (Documentation/accounting/psi.rst)."""

PSI_WARNING, PSI_CRITICAL = 10.0, 40.0
"""Percent of the last 10 s in which at least one task waited for memory."""

SYSCTL = b"kern.memorystatus_vm_pressure_level"
"""macOS: 1 is normal, 2 warning, 4 critical (xnu, bsd/kern/kern_memorystatus_notify.c)."""


class MemoryPressure(IntEnum):
    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def memory_pressure() -> MemoryPressure:
    """NORMAL also if the system does not tell."""
    if sys.platform == "darwin":
        return from_level(sysctl_int(SYSCTL))
    try:
        return from_stalls(PSI.read_text())
    except (OSError, ValueError):  # a kernel without it, or with psi=0
        return MemoryPressure.NORMAL


def from_level(level: int | None) -> MemoryPressure:
    """level: macOS's. A level between two counts as the lower one."""
    return max((each for each in MemoryPressure if each <= (level or 0)), default=MemoryPressure.NORMAL)


def from_stalls(text: str) -> MemoryPressure:
    """text: the file's. Raises ValueError for any other text."""
    for line in text.splitlines():
        kind, *fields = line.split()
        if kind == "some":
            percent = float(dict(field.split("=") for field in fields).get("avg10", "0"))
            if percent >= PSI_CRITICAL:
                return MemoryPressure.CRITICAL
            return MemoryPressure.WARNING if percent >= PSI_WARNING else MemoryPressure.NORMAL
    raise ValueError(f"no pressure in {text!r}")


def sysctl_int(name: bytes) -> int | None:
    """A 32-bit value by its name; None if the system does not have it."""
    value = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(value))
    try:
        libc = ctypes.CDLL(None)
        failed = libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    except (OSError, AttributeError):
        return None
    return None if failed else value.value
