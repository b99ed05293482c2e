"""Settings of MLX that it reads from the environment. They are set before mlx is imported, and never changed if the
user has set them."""

from __future__ import annotations

import os
import re
import sys

from mlxpaged.macos import chip

MOST_OPERATIONS, MOST_ELEMENTS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"

LONG_BUFFERS = {MOST_OPERATIONS: "1000", MOST_ELEMENTS: "400"}
"""Dispatches, and 2^20 elements of the arrays that they read and write, after which MLX ends a command buffer. By
default these are 40 or 50 each. With MLX's rule (benchmarks/command_buffers.py), a decoding step on a Max takes 1
command buffer instead of 11 for Qwen3-0.6B in 4 bits, 3 instead of 22 for Llama 3.1 8B, and 12 instead of 74 for
Qwen3-30B-A3B.
MLX frees arrays at the end of their command buffer. ml-explore/mlx#4521 measured the same peak at 20,000 tokens, and
5 to 8 % more tokens per second. `measure_step` runs the largest step with these limits, so its memory is kept free."""

REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
REFRESH_MS = "500"
"""Milliseconds after which MLX asks again for what is wired. macOS 26 lets go of wired memory a second after its last
use (ggml-org/llama.cpp#17766). MLX 0.32.4 asks only once by default."""

SHORTER_BUFFERS = {MOST_OPERATIONS: "1000", MOST_ELEMENTS: "100"}
"""For base and Pro chips. With 400, a command buffer of a chunk of 2,048 tokens of an 8B model lasts up to 2 s on a
base chip (estimated), and macOS ends command buffers that hold up the display (jundot/omlx#1387). A chunk takes a
quarter of the memory too (docs/performance.md)."""

LAST_GENERATION = 4
"""Longer command buffers help on M1 to M4. On M5 they do not (lablup/mlxcel#360)."""


def prepare() -> None:
    if sys.platform == "darwin" and not LONG_BUFFERS.keys() <= os.environ.keys():
        for name, value in buffers_of(chip()).items():
            os.environ.setdefault(name, value)


def buffers_of(chip: str) -> dict[str, str]:
    """The limits for a chip by its name; none for one whose own limits stay."""
    found = re.match(r"Apple M(\d+)(?: (\w+))?", chip)
    if found is None or int(found[1]) > LAST_GENERATION:
        return {}
    return LONG_BUFFERS if found[2] in ("Max", "Ultra") else SHORTER_BUFFERS


def keep_wired() -> None:
    """Let MLX ask again and again for what is wired. It reads that when it is imported."""
    if sys.platform == "darwin":
        os.environ.setdefault(REFRESH, REFRESH_MS)


def keeps_wired() -> bool:
    return os.environ.get(REFRESH, "0").strip() not in ("", "0")
