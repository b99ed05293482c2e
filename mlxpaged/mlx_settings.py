"""Settings of MLX that it reads from the environment. They are set before mlx is imported, and never changed if the
user has set them."""

from __future__ import annotations

import ctypes
import os
import re
import sys

MAX_OPS = "MLX_MAX_OPS_PER_BUFFER"
"""Dispatches after which MLX ends a command buffer; by default 40 or 50."""

FEW_BUFFERS = "1000"
"""Then weights alone end command buffers. With the rule in attention/command_buffers.py, a decoding step of Qwen3-0.6B
in 4 bits takes 3 command buffers instead of 11, one of Qwen3-4B 13 instead of 16, and one of an 8B model as many as
before."""

LAST_GENERATION = 4
"""Fewer command buffers help on M1 to M4. On M5 they do not (lablup/mlxcel#360)."""


def prepare() -> None:
    if sys.platform == "darwin" and MAX_OPS not in os.environ:
        generation = re.match(r"Apple M(\d+)", chip())
        if generation and int(generation[1]) <= LAST_GENERATION:
            os.environ[MAX_OPS] = FEW_BUFFERS


def chip() -> str:
    """For example "Apple M4 Max"; "" if macOS does not say."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    found = ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", name, ctypes.byref(size), None, 0)
    return name.value.decode() if found == 0 else ""
