"""Keeps weights and pools resident for the GPU ("wired") on a Mac that waits for requests. Off unless it is asked for.

macOS may page them out while the server is idle, and the next answer begins late. MLX wires each allocation that fits
into its limit (mlx/backend/metal/resident.cpp, `insert`, of 0.32.4), and takes it out when it is freed. macOS has
panicked under MLX servers that had set a limit, when buffers entered and left the sets of wired memory while requests
ran (ml-explore/mlx#3186, ml-explore/mlx-lm#1666, lmstudio-bug-tracker#2249). Only servers that never set it are known
to be safe. So "auto" sets none.

With "on", the limit is set while no request runs, and is 0 from the next request on: no array of a step can enter a set
then. It is 0 too before anything that is wired is freed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import mlx.core as mx

from mlxpaged.mlx_settings import keeps_wired

logger = logging.getLogger(__name__)

SLACK = 16 * 2**20
"""Bytes by which the limit is larger than what MLX counts. Metal rounds each buffer up to pages, and MLX's heap of
1 MiB is wired too. Without slack some buffer would be left out."""

WIRE_AFTER_SECONDS = 30.0
"""Seconds without a request after which memory is wired. Each time is a change of the sets, and macOS pages nothing out
so soon."""

_choice = "auto"
_is_wired = False


def choose_wiring(choice: str) -> None:
    """Set whether memory is wired: "auto", "on" or "off" (--wired-memory). It holds for the process, as MLX's limit
    does."""
    global _choice
    _choice = choice
    if wires_memory() and not keeps_wired():
        logger.warning("mlx was imported before memory was to be wired: macOS 26 lets go of it after a second")


def wires_memory() -> bool:
    return _choice == "on" and mx.metal.is_available()


def wire_memory() -> int:
    """Wire all that is allocated, on the thread that uses MLX, while no request runs. Returns the bytes; 0 if nothing
    is wired. Before macOS 15, MLX ignores the limit. A limit that MLX refuses is only logged, and not tried again until
    a request has run."""
    global _is_wired
    if not wires_memory():
        return 0
    mx.clear_cache()
    active = int(mx.get_active_memory())
    _is_wired = True
    try:
        mx.set_wired_limit(min(active + SLACK, int(mx.device_info()["max_recommended_working_set_size"])))
    except (RuntimeError, ValueError) as error:
        logger.warning("the model's memory is not wired: %s", error)
        return 0
    logger.info("%.1f GB are resident for the GPU until the next request", active / 1e9)
    return active


def unwire_memory() -> None:
    """Take all out of the sets of wired memory, on the thread that uses MLX. Nothing happens if nothing is wired. MLX's
    refreshing thread has then nothing to refresh."""
    global _is_wired
    if _is_wired:
        _is_wired = False
        mx.set_wired_limit(0)


class IdleWiring:
    """Wires memory when no model has had work for a while. Belongs to the thread that uses MLX. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._active_at = clock()

    def note_use(self) -> None:
        """A request runs now, or memory is about to be allocated or freed."""
        if _choice == "on":
            self._active_at = self._clock()
            unwire_memory()

    def rest(self) -> None:
        """No model has work, and none is being loaded or resized."""
        if self.pause() == 0.0:
            wire_memory()

    def pause(self) -> float:
        """Seconds until `rest` has something to do, if no request arrives."""
        if _is_wired or not wires_memory():
            return math.inf
        return max(0.0, self._active_at + WIRE_AFTER_SECONDS - self._clock())
