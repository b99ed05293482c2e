"""Which generation of Apple's GPUs this is."""

from __future__ import annotations

import re

import mlx.core as mx

M1, M2 = 13, 14


def gpu_generation() -> int | None:
    """The generation of Apple's GPUs, as 13 for M1; None on other devices."""
    if not mx.metal.is_available() or mx.default_device() == mx.Device(mx.cpu):
        return None
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", "")))
    return int(found[1]) if found else None


def has_fixed_registers() -> bool:
    """Whether a thread has at most 128 registers, as on M1 and M2. Later GPUs allot them as they are needed."""
    return gpu_generation() in (M1, M2)
