"""The engine of a model that only makes embeddings."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxpaged.core.engine.worker import Worker
from mlxpaged.parts.embeddings.embedder import Embedder
from mlxpaged.parts.memory.memory_pressure import MemoryPressure, memory_pressure
from mlxpaged.parts.memory.memory_watch import POLL_SECONDS, MemoryWatch


class EmbeddingCore(Worker):
    """It keeps nothing between two requests but the freed buffers of a step, for a while. clock: seconds."""

    embedder: Embedder

    def __init__(
        self,
        embedder: Embedder,
        clock: Callable[[], float],
        pressure: Callable[[], MemoryPressure] = memory_pressure,
    ) -> None:
        super().__init__(embedder)
        self.step_bytes = embedder.step_bytes  # that the next step may take again
        self._watch = MemoryWatch(clock, mx.clear_cache, pressure)

    def embeds(self) -> bool:
        if embeds := super().embeds():
            self._watch.note_use()
        return embeds

    def pause(self) -> float:
        return min(super().pause(), POLL_SECONDS) if mx.get_cache_memory() else super().pause()

    def rest(self, device_is_idle: bool) -> bool:
        """Give back freed buffers."""
        self._watch.poll(device_is_idle)
        return False
