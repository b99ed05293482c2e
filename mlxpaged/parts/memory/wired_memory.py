"""Keeps on a Mac what is constant, weights and pools, resident for the GPU ("wired"), and nothing of a step.

Otherwise macOS pages them out while the server is idle, and the next request is slow. MLX wires each allocation that
fits into its limit (mlx/backend/metal/resident.cpp, `insert`, of 0.32.2). Under a limit of the whole working set, the
arrays of each step enter and leave the sets of wired memory, and macOS 26 panics under concurrent streams
(ml-explore/mlx#3186, ml-explore/mlx-lm#1666). So the limit is what is allocated between two steps, and is set again
after each load, unload and resize of a pool.
"""

from __future__ import annotations

import logging

import mlx.core as mx

logger = logging.getLogger(__name__)

LEAST_MEMORY = 24 * 2**30
"""Memory of a Mac from which on "auto" wires. Wired memory has frozen Macs with 16 GB (osaurus#2612, exo#1672)."""

SLACK = 16 * 2**20
"""Bytes by which the limit is larger than what MLX counts. Metal rounds each buffer up to pages, and MLX's heap of
1 MiB is wired too. Without slack some buffer would be left out, and arrays of steps would take its place."""

PAGE = 2**14
"""Bytes of a page of Apple silicon."""

_choice = "auto"
_filling: list[mx.array] = []
"""Arrays that fill what is left of the limit, to less than a page."""


def choose_wiring(choice: str) -> None:
    """Set whether memory is wired: "auto", "on" or "off" (--wired-memory). It holds for the process, as MLX's limit
    does."""
    global _choice
    _choice = choice


def wires_memory() -> bool:
    if _choice == "off" or not mx.metal.is_available():
        return False
    return _choice == "on" or int(mx.device_info()["memory_size"]) >= LEAST_MEMORY


def wire_memory() -> int:
    """Wire all that is allocated, on the thread that uses MLX, with no step in flight. Returns the bytes; 0 if nothing
    is wired. Before macOS 15, MLX ignores the limit. A limit that MLX refuses is only logged."""
    if not wires_memory():
        return 0
    _filling.clear()
    mx.clear_cache()
    active = int(mx.get_active_memory())
    try:
        mx.set_wired_limit(min(active + SLACK, int(mx.device_info()["max_recommended_working_set_size"])))
        size = SLACK
        while (size := size // 2) >= PAGE:  # the largest first: each one that fits halves what can be left
            _filling.append(mx.zeros((size,), mx.uint8))
            mx.eval(_filling[-1])
    except (RuntimeError, ValueError) as error:
        logger.warning("the model's memory is not wired: %s", error)
        return 0
    return active
