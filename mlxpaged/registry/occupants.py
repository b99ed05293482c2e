"""The loaded models, and which of them make room for another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.registry.errors import NoRoomError
from mlxpaged.registry.model import Model
from mlxpaged.registry.swaps import SwapLine

logger = logging.getLogger(__name__)

HANDOVER_SECONDS = 0.1
"""A request has come to its engine so long after the load for which it has waited."""

UNCOUNTED_BYTES = 2 * 2**30
"""A model may free more than its weights and pools: buffers of steps. A model that lacks more than all this is refused
at once, and no other is unloaded for it."""


@dataclass(frozen=True)
class Limits:
    """max_loaded: models that are loaded at once; None for as many as fit. idle_unload: seconds without a request after
    which a model is unloaded; None for never. swap_wait: seconds for which a request waits for room until models that
    have room take no new requests."""

    max_loaded: int | None = None
    idle_unload: float | None = None
    swap_wait: float = 30.0


class Occupants:
    """Belongs to the event loop. models, limits, clock: as Registry has them."""

    def __init__(self, models: Mapping[str, Model], limits: Limits, line: SwapLine, clock: Callable[[], float]) -> None:
        self._models, self._limits, self._line, self._clock = models, limits, line, clock
        self._handed_over: dict[str, float] = {}  # by model: until when requests come that have waited for its load

    @property
    def engines(self) -> list[AsyncEngine]:
        """Those that are loaded or loading."""
        return [model.engine for model in self._models.values() if model.engine is not None]

    @property
    def loaded(self) -> list[Model]:
        return [model for model in self._models.values() if model.is_loaded]

    @property
    def is_busy(self) -> bool:
        """Whether a loaded model has requests, so that there may be room later."""
        return any(not model.is_idle for model in self.loaded)

    @property
    def may_leave(self) -> dict[str, bool]:
        """The loaded models, with whether they may be unloaded. Nothing else gives another one room."""
        return {model.name: self._may_be_unloaded(model) for model in self.loaded}

    @property
    def will_make_room(self) -> bool:
        """Whether a loaded model will be unloaded for another one when its requests have ended."""
        return any(not model.pinned for model in self.loaded)

    def expect(self, model: Model) -> None:
        """Keep a model whose load has ended until the requests that have waited for it come to its engine."""
        self._handed_over[model.name] = asyncio.get_running_loop().time() + HANDOVER_SECONDS

    def is_leaving(self, model: Model) -> bool:
        """Whether it takes no new requests, because it is to make room for another one."""
        return self._line.leaving([each.name for each in self.loaded if not each.pinned]) == model.name

    def _may_be_unloaded(self, model: Model) -> bool:
        """Whether a loaded model is idle, and its client does not go on soon."""
        if not self._has_ended(model):
            return False
        if asyncio.get_running_loop().time() < self._handed_over.get(model.name, 0.0):
            return False  # a request that has waited for it comes to its engine
        return self.is_leaving(model) or self._clock() - model.idle_since >= self._line.linger(model.name)

    def _has_ended(self, model: Model) -> bool:
        """Whether a loaded model has no requests. Those that wait until it has made room for another one do not
        count."""
        if model.pinned or model.engine is None or not model.engine.is_idle:
            return False
        return model.is_idle or self.is_leaving(model)

    async def keep_count(self) -> None:
        """Unload models until one more may be loaded. Raises NoRoomError."""
        most = self._limits.max_loaded
        while most is not None and len(self.loaded) >= most:
            if not await self.unload_least_recent():
                busy = ", ".join(repr(each.name) for each in self.loaded)
                message = f"{busy} run requests or are pinned, and --max-loaded-models is {most}"
                raise NoRoomError(message, self.is_busy, self.will_make_room)

    def reclaimable_bytes(self, in_time: bool = False) -> int:
        """Most bytes that the loaded models could free for another one. in_time: after their requests have ended."""
        return UNCOUNTED_BYTES + sum(model.reclaimable_bytes(in_time) for model in self.loaded)

    async def unload_least_recent(self) -> bool:
        """Unload the idle model that was used least recently. Returns False if there is none, or it is to stay for
        now."""
        idle = filter(self._has_ended, self.loaded)
        oldest = min(idle, key=lambda model: model.idle_since, default=None)
        if oldest is None or not self._may_be_unloaded(oldest):
            return False
        await self.drop(oldest)
        return True

    async def give_back(self) -> bool:
        """Free what the loaded models do not need of their KV pools. Returns whether it was anything."""
        engines = [model.engine for model in self.loaded if model.engine is not None]
        return any(await asyncio.gather(*(engine.give_back() for engine in engines)))

    async def drop(self, model: Model) -> None:
        """Unload a model that has an engine."""
        engine = model.forget_engine()
        assert engine is not None
        await engine.unload()
        self._line.unloaded(model.name)
        logger.info("%s is unloaded", model.name)
