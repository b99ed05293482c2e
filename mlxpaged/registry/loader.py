"""Loads models on first use: a request for a model that is not loaded waits for its load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.engine_thread import EngineHost
from mlxpaged.registry.errors import LoadFailedError, ModelBusyError, NoRoomError
from mlxpaged.registry.model import Model, ModelState
from mlxpaged.registry.occupants import Occupants
from mlxpaged.registry.swaps import SwapLine

logger = logging.getLogger(__name__)

LEAVING_SECONDS = 1.0
"""Seconds between two checks of whether a model still makes room for another one."""

POLL_SECONDS = 0.1
"""Seconds between two checks of whether there is room for a model that waits for it."""

RETRY_SECONDS = 10.0
"""A model that waits for room tries again after this time in any case: other programs may have made some."""


class Loader:
    """Belongs to the event loop. begin: starts a model's engine. draining: why no model is loaded any more."""

    def __init__(
        self,
        occupants: Occupants,
        line: SwapLine,
        host: EngineHost,
        begin: Callable[[Model], AsyncEngine],
        clock: Callable[[], float],
    ) -> None:
        self._occupants, self._line, self._host, self._begin, self._clock = occupants, line, host, begin, clock
        self.draining: str | None = None
        self._alarm: asyncio.Future[str] | None = None  # the next stall of the engine thread

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call it before the first load."""
        self._alarm = loop.create_future()

    def refuse(self, reason: str) -> None:
        """Load no model from now on."""
        self.draining = reason

    def end_waiting(self, stall: str) -> None:
        """The engine thread is stalled: end what waits for a load. The loads go on."""
        assert self._alarm is not None
        self._alarm.set_result(stall)
        self._alarm = self._alarm.get_loop().create_future()

    async def ready(self, model: Model, priority: Priority = Priority.NORMAL) -> AsyncEngine:
        """The engine of a model, loaded if it is not. While the server starts, nothing waits for the models of the
        start. priority: of the request. Raises EngineUnavailableError, LoadFailedError or NoRoomError."""
        if self.draining is not None:
            raise EngineUnavailableError(EngineState.DRAINING, self.draining)
        model.used_at = int(time.time())
        self._line.asked(model.name)
        engine = model.engine
        if engine is None or self.must_load(model):
            return await self.load(model, priority)
        engine.require_ready()
        engine.touch()
        return engine

    def must_load(self, model: Model) -> bool:
        """Whether a request for the model waits: until it is loaded, or while it makes room for another one."""
        waits = model.engine is None or model.loading is not None or self._occupants.is_leaving(model)
        return self.draining is None and waits

    def waiting_for(self, model: Model) -> str:
        """What a request for the model waits for: its load, or others before it."""
        if model.engine is not None and not self._occupants.is_leaving(model):
            return "loading" if model.engine.progress is None else str(model.engine.progress)
        running = sum(engine.num_unfinished for engine in self._occupants.engines)
        return f"waiting for {model.name}, {running + self._line.ahead(model.name)} ahead"

    async def load(self, model: Model, priority: Priority = Priority.NORMAL) -> AsyncEngine:
        """Load a model, unless it is loaded: then its requests would wait for the loads of others. It waits while other
        models that have no more room beside it run requests (swaps.py). A load goes on if the caller is cancelled. A
        model whose engine failed is loaded anew. Raises LoadFailedError, NoRoomError, or EngineUnavailableError if the
        server shuts down, the engine thread stalls or the model is unloaded meanwhile."""
        if model.is_loaded and model.engine is not None and not self.must_load(model):
            return model.engine
        if (loading := model.loading) is None:
            loading = model.loading = asyncio.ensure_future(self._load(model))
            loading.add_done_callback(lambda task: self._end_loading(model, task))
        alarm = self._alarm
        assert alarm is not None
        with model.wanted(), self._line.waits(model.name, priority):
            either: list[asyncio.Future[Any]] = [loading, alarm]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise EngineUnavailableError(EngineState.STALLED, alarm.result())
            if not loading.cancelled():
                engine = loading.result()
                self._occupants.expect(model)
                return engine
        if self.draining is not None:
            raise EngineUnavailableError(EngineState.DRAINING, self.draining)
        raise EngineUnavailableError(EngineState.LOADING, f"{model.name!r} was unloaded before its load had ended")

    def _end_loading(self, model: Model, task: asyncio.Task[AsyncEngine]) -> None:
        model.loading = None
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LoadFailedError):  # a model that only finds no room has not failed
            model.error = str(error)

    async def _load(self, model: Model) -> AsyncEngine:
        with contextlib.ExitStack() as until_loaded:
            is_blocked = False
            while True:
                while model.is_loaded and self._occupants.is_leaving(model):
                    await self._line.change(LEAVING_SECONDS)
                async with self._line.turn(model.name):
                    if model.is_loaded and model.engine is not None:
                        if self._occupants.is_leaving(model):
                            continue
                        return model.engine
                    before = self._occupants.may_leave
                    try:
                        return await self._load_now(model)
                    except NoRoomError as error:
                        if not error.in_time:
                            raise
                        if not is_blocked:
                            is_blocked = True
                            until_loaded.enter_context(self._line.blocked(model.name))
                            logger.info("%s waits for room: %s", model.name, error)
                until = asyncio.get_running_loop().time() + RETRY_SECONDS
                while self._occupants.may_leave == before and asyncio.get_running_loop().time() < until:
                    if not model.num_waiting:
                        raise NoRoomError("no request waits for the model any more", for_now=True)
                    await self._line.change(POLL_SECONDS)

    async def _load_now(self, model: Model) -> AsyncEngine:
        """Raises LoadFailedError, or NoRoomError if it does not fit beside the models that cannot be unloaded now."""
        model.error = None
        if model.engine is not None:
            await self._occupants.drop(model)
        gave_back = False
        while True:
            await self._occupants.keep_count()
            engine, started = self._begin(model), self._clock()
            try:
                await engine.wait_loaded()
            except asyncio.CancelledError:
                model.engine = None
                self._host.unload(engine.slot)
                raise
            except EngineUnavailableError:
                model.engine, failure = None, engine.failure
                if failure is None or not failure.lacks_memory:
                    logger.error("%s is not loaded: %s", model.name, engine.reason)
                    raise LoadFailedError(str(engine.reason)) from None
                logger.info("%s does not fit yet: %s", model.name, failure.reason)
                if failure.missing_bytes <= self._occupants.reclaimable_bytes():
                    if await self._occupants.unload_least_recent():
                        continue
                    if not gave_back and await self._occupants.give_back():
                        gave_back = True
                        continue
                fits_in_time = failure.missing_bytes <= self._occupants.reclaimable_bytes(in_time=True)
                raise NoRoomError(
                    failure.reason, self._occupants.is_busy, fits_in_time and self._occupants.will_make_room
                ) from None
            logger.info("%s is loaded", model.name)
            self._line.loaded(model.name, self._clock() - started)
            return engine

    async def unload(self, model: Model) -> None:
        """Unload a model that runs nothing, pinned or not. A load that has not ended is cancelled. It does not wait for
        the load of another model. Raises ModelBusyError."""
        if (loading := model.loading) is not None:
            engine = model.engine
            loading.cancel()
            await asyncio.wait([loading])
            if engine is not None and model.engine is None:
                await engine.unload()  # until what it has loaded is free
        model.error = None
        if model.engine is None:
            return
        if model.state is not ModelState.FAILED and not model.is_idle:
            raise ModelBusyError(f"{model.name!r} runs requests or is about to: {model.engine.num_unfinished} now")
        await self._occupants.drop(model)
