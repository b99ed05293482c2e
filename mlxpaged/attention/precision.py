"""How exactly MLX computes float32 matrix products on this machine."""

from __future__ import annotations

import os
import platform
import re

import mlx.core as mx

TF32_UNIT = 2.0**-11
"""The relative distance of neighbouring TF32 numbers, at least: they have the significand of float16."""


def rounds_float32() -> bool:
    """Whether MLX rounds the factors of float32 matrix products and of its attention to TF32.

    It does with neural accelerators, on the GPU of an M5 or later, from macOS 26.2 on, unless MLX_ENABLE_TF32 is 0
    (ml-explore/mlx: is_nax_available in backend/metal/device.cpp, enable_tf32 in utils.h). MLX reads the variable at
    its first product and keeps it, and it holds for the whole process. So it is not changed for a comparison.
    """
    return not forbids_tf32() and has_neural_accelerators()


def has_neural_accelerators() -> bool:
    """Whether the GPU and the system have what MLX calls NAX (is_nax_available in backend/metal/device.cpp)."""
    if not mx.metal.is_available():
        return False
    found = re.search(r"(\d\d)([a-z])$", str(mx.device_info().get("architecture", "")))  # such as applegpu_g17s
    release = tuple(int(part) for part in re.findall(r"\d+", platform.mac_ver()[0])[:2])
    return found is not None and int(found[1]) >= (18 if found[2] == "p" else 17) and release >= (26, 2)


def uses_neural_accelerators() -> bool:
    """Whether MLX computes products on them: factors of float32 are rounded to TF32 there, so 1 + 2^-13 becomes 1.
    An MLX may be built without them, as Homebrew's is."""
    size = 128
    product = mx.full((size, size), 1 + TF32_UNIT / 4) @ mx.eye(size)
    return bool((product == 1).all())


def forbids_tf32() -> bool:
    return os.environ.get("MLX_ENABLE_TF32", "1").strip() == "0"
