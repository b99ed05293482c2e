"""Loads models on first use and unloads idle ones. All models share one engine thread and the machine's memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.stall import Stall
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.engine_thread import EngineHost, EngineThread
from mlxpaged.engine.load_journal import LoadJournal
from mlxpaged.engine.watchdog import StallLimits, Watchdog
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.sources.short_names import LATEST, full_name, without_address
from mlxpaged.models.sources.source import source_path
from mlxpaged.progress import Progress
from mlxpaged.registry.catalog import Catalog, Found
from mlxpaged.registry.errors import LoadFailedError, ModelBusyError, ModelUnknownError, NoRoomError
from mlxpaged.registry.model import Model, ModelState
from mlxpaged.registry.profile import Profile
from mlxpaged.registry.swaps import SwapLine

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Seconds between two checks of which models have been idle for too long."""

POLL_SECONDS = 0.1
"""Seconds between two checks of whether there is room for a model that waits for it."""

RETRY_SECONDS = 10.0
"""A model that waits for room tries again after this time in any case: other programs may have made some."""

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


@dataclass
class Registry:
    """Belongs to the event loop that `start` got, but for its construction and `start`.

    models: served from the start, by name; the first one is the default. num_at_start: how many of them are loaded at
    the start. aliases: other names of models. profiles: by their names. base: configuration of models that no flag
    names; only their names differ. clock: seconds. watchdog: None for a registry without one. engine_host: None for an
    engine thread. loads: notes what the engine thread loads; None if no later process would know.
    """

    models: dict[str, Model]
    base: EngineConfig
    num_at_start: int = 1
    aliases: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    limits: Limits = Limits()
    catalog: Catalog = field(default_factory=Catalog)
    clock: Callable[[], float] = time.monotonic
    watchdog: StallLimits | None = None
    engine_host: EngineHost | None = None
    loads: LoadJournal | None = None

    def __post_init__(self) -> None:
        self.host: EngineHost = self.engine_host or EngineThread(self.clock, self.loads)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._on_output: Callable[[str, Request, RequestOutput], None] | None = None
        self._draining: str | None = None
        self._started = False
        self.line = SwapLine(self.limits.swap_wait, self.clock)
        self._handed_over: dict[str, float] = {}  # by model: until when requests come that have waited for its load
        self._watcher: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()  # set when a model may have to be unloaded
        self._watchdog: Watchdog | None = None
        self._alarm: asyncio.Future[None] | None = None  # done at the next stall

    @classmethod
    def of(cls, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> Registry:
        """A registry that serves one model."""
        name = config.served_model_name or config.model
        return cls({name: Model(name, config)}, config, clock=clock)

    # -- start and end -------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Begin to load the models of the start.

        loop: an event loop that will run later; None: the running one.
        """
        self.loop = loop or asyncio.get_running_loop()
        self._alarm = self.loop.create_future()
        if self.watchdog is not None:
            assert isinstance(self.host, EngineThread), "other hosts have their own"
            self._watchdog = Watchdog(self.host, self.watchdog, self.clock, self._raise_alarm)
            self._watchdog.start()
        for model in self._at_start:
            self._begin(model)

    def observe(self, on_output: Callable[[str, Request, RequestOutput], None]) -> None:
        """Call `on_output` with every output, its request and its model's name."""
        self._on_output = on_output
        for model in self.models.values():
            if model.engine is not None:
                model.engine.on_output = partial(on_output, model.name)

    @property
    def _at_start(self) -> list[Model]:
        return list(self.models.values())[: self.num_at_start]

    def _begin(self, model: Model) -> AsyncEngine:
        engine = model.engine = AsyncEngine(model.config, self.clock, self.host)
        if self._on_output is not None:
            engine.on_output = partial(self._on_output, model.name)
        engine.on_idle = partial(self._note_idle, model)
        engine.start(self.loop)
        return engine

    def _note_idle(self, model: Model) -> None:
        self._is_idle.set()
        self.line.idle(model.name)

    def _raise_alarm(self, stall: Stall) -> None:
        """Raises the alarm, on the watchdog's thread."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._end_waiting, stall)

    def _end_waiting(self, stall: Stall) -> None:
        """The engine thread is stalled: end what waits for it."""
        for engine in self.engines:
            engine.end_waiting(str(stall), () if stall.size is None else stall.size.request_ids)
        if self._alarm is not None and self.loop is not None:
            self._alarm.set_result(None)
            self._alarm = self.loop.create_future()

    async def wait_loaded(self) -> None:
        """Wait for the models of the start. Raises EngineUnavailableError if one of them cannot be loaded."""
        for model in self._at_start:
            if model.engine is not None:
                await model.engine.wait_loaded()

    def watch(self) -> None:
        """Unload idle models from now on, if that is wanted."""
        if self.limits.idle_unload is not None:
            self._watcher = asyncio.ensure_future(self._unload_idle(self.limits.idle_unload))

    def keep(self, model: Model, seconds: float) -> None:
        """Unload a loaded model this long after its last request, whatever the limits say. math.inf: never."""
        if model.engine is not None:
            model.keep_alive = seconds
            self._watcher = self._watcher or asyncio.ensure_future(self._unload_idle(WATCH_SECONDS))
            self._is_idle.set()

    def seconds_left(self, model: Model) -> float:
        """How long the model stays loaded if no request comes any more; math.inf for as long as there is room."""
        limit = self.limits.idle_unload if model.keep_alive is None else model.keep_alive
        if limit is None or model.pinned:
            return math.inf
        return limit if not model.is_idle else max(0.0, model.idle_since + limit - self.clock())

    async def drain(self, timeout: float, reason: str = "the server is shutting down") -> bool:
        """Take no more requests, and wait until the others are done. Returns False if some had to be ended. Loads end,
        and requests that wait for them are refused: a load can take an hour if it downloads the model."""
        self._draining = reason
        self.end_journal()
        for model in self.models.values():
            if model.loading is not None:
                model.loading.cancel()
        return all(await asyncio.gather(*(engine.drain(timeout) for engine in self.engines)))

    def end_journal(self) -> None:
        """The process ends as it should: a load that has not ended is no reason for it."""
        if self.loads is not None:
            self.loads.close()

    async def cancel(self, request_ids: Sequence[str]) -> list[EndedRequest]:
        """Cancel requests of any model, as AsyncEngine.cancel does, also of one whose ranks start again."""
        ended = await asyncio.gather(*(engine.cancel(request_ids) for engine in self.engines if engine.num_unfinished))
        return [each for some in ended for each in some]

    def end_all(self, error: str) -> None:
        """End every request with an error."""
        for engine in self.engines:
            engine.end_all(error)

    async def stop(self, timeout: float) -> bool:
        """End the engine thread. Returns False if it does not end within `timeout` seconds."""
        if self._watchdog is not None:
            self._watchdog.end()
        tasks = [self._watcher, *(model.loading for model in self.models.values())]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        return self.host.ident is None or await asyncio.to_thread(self.host.stop, timeout)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def default(self) -> Model:
        return next(iter(self.models.values()))

    @property
    def engines(self) -> list[AsyncEngine]:
        """Those that are loaded or loading."""
        return [model.engine for model in self.models.values() if model.engine is not None]

    @property
    def loaded(self) -> list[Model]:
        return [model for model in self.models.values() if model.is_loaded]

    @property
    def num_unfinished(self) -> int:
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def state(self) -> EngineState:
        """STALLED while work of the engine thread has not ended in time; LOADING until the models of the start are
        loaded, and while the default model's ranks start again; DEAD if the default model's engine failed."""
        if self._draining is not None:
            return EngineState.DRAINING
        if self.stall is not None:
            return EngineState.STALLED
        states = [model.engine.state for model in self._at_start if model.engine is not None]
        if self.default.engine is not None and self.default.engine.state is EngineState.DEAD:
            return EngineState.DEAD
        restarts = self.default.engine is not None and self.default.engine.is_restarting
        if restarts or (not self._started and EngineState.LOADING in states):
            return EngineState.LOADING
        self._started = True
        return EngineState.READY

    @property
    def stall(self) -> Stall | None:
        """The work of the engine thread that has not ended in time and still runs."""
        return self.host.stall

    @property
    def is_started(self) -> bool:
        """Whether the models of the start were loaded."""
        return self._started or self.state is EngineState.READY

    def require_started(self) -> None:
        """Raises EngineUnavailableError if the server takes no requests: while it starts, ends or is stalled."""
        if (state := self.state) in (EngineState.LOADING, EngineState.DRAINING, EngineState.STALLED):
            message = self.reason or f"the model is still loading{f': {self.progress}' if self.progress else ''}"
            raise EngineUnavailableError(state, message)
        if not self._started and self.default.engine is not None:
            self.default.engine.require_ready()

    def require_ready(self) -> None:
        """Raises EngineUnavailableError if the server takes no requests for the default model."""
        self.require_started()
        if self.default.engine is not None and self.default.engine.state is EngineState.DEAD:
            self.default.engine.require_ready()

    @property
    def reason(self) -> str | None:
        """Why the server takes no requests."""
        if self._draining is not None:
            return self._draining
        if (stall := self.stall) is not None:
            return str(stall)
        return None if self.default.engine is None else self.default.engine.reason

    @property
    def progress(self) -> Progress | None:
        """The progress of the model that is being loaded, or of the one that was loaded last at the start."""
        engines = sorted(self.engines, key=lambda engine: engine.state is not EngineState.LOADING)
        return next((engine.progress for engine in engines if engine.progress is not None), None)

    # -- models by name ------------------------------------------------------------------------------------------

    def served(self, name: str | None) -> Model | None:
        """The model of this name, if it is served; the default one for None. The name may be MODEL:ADAPTER."""
        if name is None:
            return self.default
        found = self._served(without_address(name))
        return None if found is None else found[0]

    def adapter_in(self, name: str | None) -> str | None:
        """The adapter of a model's name; None if it has none."""
        found = None if name is None else self._served(without_address(name))
        return None if found is None else found[1]

    def profile_in(self, name: str | None) -> Profile | None:
        """The profile of this name, if it is that of one."""
        name = "" if name is None else without_address(name)
        return self.profiles.get(name) or self.profiles.get(name.removesuffix(LATEST))

    def _served(self, name: str) -> tuple[Model, str | None] | None:
        if (profile := self.profile_in(name)) is not None:
            name = profile.model
        for each in (name, name.removesuffix(LATEST)):
            if (model := self.models.get(self.aliases.get(each, each))) is not None:
                return model, None
            base, _, adapter = each.rpartition(":")
            model = self.models.get(self.aliases.get(base, base))
            if model is not None and adapter in model.adapters:
                return model, adapter
        return None

    async def find(self, name: str | None, any_directory: bool = False) -> Model:
        """Find a model, and serve it from now on if it is only on this machine. any_directory: whether the name may be
        an absolute path. Raises ModelUnknownError."""
        if (model := self.served(name)) is not None:
            if not model.is_gone:
                return model
            del self.models[model.name]
        assert name is not None
        found = await asyncio.to_thread(self._on_disk, name, any_directory)
        if found is None:
            raise ModelUnknownError(name)
        return self._served_as(found) or self.models.setdefault(found.name, self._model_of(found))

    def _on_disk(self, name: str, any_directory: bool) -> Found | None:
        self._look_at_files()
        for each in dict.fromkeys((name, name.removesuffix(LATEST))):
            is_path = any_directory and each.startswith(("/", "~"))
            if (found := self.catalog.find_directory(each) if is_path else self.catalog.find(each)) is not None:
                return found
        return None

    def _served_as(self, found: Found) -> Model | None:
        """The served model of this directory: it is not loaded twice if a request gives it another name."""
        return next((model for model in self.models.values() if is_same(model, found)), None)

    def _look_at_files(self) -> None:
        """Reads what the files of served models say. Those of a loaded one are where they were."""
        for model in list(self.models.values()):
            is_known = model.engine is not None and model.found is not None
            model.look(None if is_known else self.catalog.find_source(model.config.model))

    async def look(self) -> None:
        """Read what the files of served models say, as far as they have changed."""
        await asyncio.to_thread(self._look_at_files)

    async def on_disk(self) -> list[Model]:
        """The models on this machine that are not served yet. Reads what the files of those that are say, and serves
        those no more that were deleted."""

        def look() -> list[Model]:
            self._look_at_files()
            models = [self._model_of(found) for found in self.catalog.all()]
            for model in models:
                model.look(None)
            return models

        models = await asyncio.to_thread(look)
        for gone in [model for model in self.models.values() if model.is_gone]:
            del self.models[gone.name]
        is_served = {each.name for each in models if each.found is not None and self._served_as(each.found) is not None}
        return [each for each in models if each.name not in self.models and each.name not in is_served]

    def _model_of(self, found: Found) -> Model:
        config = dataclasses.replace(
            self.base,
            model=str(found.path),
            served_model_name=found.name,
            tool_parser=None,
            chat_template=None,
            reranker=False,
            only_embeds=found.kind is Kind.EMBEDDING,
        )
        return Model(found.name, config, found=found, is_found=True)

    # -- loading and unloading -----------------------------------------------------------------------------------

    async def ready(self, model: Model, priority: Priority = Priority.NORMAL) -> AsyncEngine:
        """The engine of a model, loaded if it is not. While the server starts, nothing waits for the models of the
        start. priority: of the request. Raises EngineUnavailableError, LoadFailedError or NoRoomError."""
        if self._draining is not None:
            raise EngineUnavailableError(EngineState.DRAINING, self._draining)
        model.used_at = int(time.time())
        self.line.asked(model.name)
        engine = model.engine
        if engine is None or self.must_load(model):
            return await self.load(model, priority)
        engine.require_ready()
        engine.touch()
        return engine

    def must_load(self, model: Model) -> bool:
        """Whether a request for the model waits: until it is loaded, or while it makes room for another one."""
        waits = model.engine is None or model.loading is not None or self._is_leaving(model)
        return self._draining is None and waits

    def waiting_for(self, model: Model) -> str:
        """What a request for the model waits for: its load, or others before it."""
        if model.engine is not None and not self._is_leaving(model):
            return "loading" if model.engine.progress is None else str(model.engine.progress)
        running = sum(engine.num_unfinished for engine in self.engines)
        return f"waiting for {model.name}, {running + self.line.ahead(model.name)} ahead"

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
        with model.wanted(), self.line.waits(model.name, priority):
            either: list[asyncio.Future[Any]] = [loading, alarm]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                raise EngineUnavailableError(EngineState.STALLED, self.reason or "the engine was stalled")
            if not loading.cancelled():
                engine = loading.result()
                self._handed_over[model.name] = asyncio.get_running_loop().time() + HANDOVER_SECONDS
                return engine
        if self._draining is not None:
            raise EngineUnavailableError(EngineState.DRAINING, self._draining)
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
                while model.is_loaded and self._is_leaving(model):
                    await self.line.change(WATCH_SECONDS)
                async with self.line.turn(model.name):
                    if model.is_loaded and model.engine is not None:
                        if self._is_leaving(model):
                            continue
                        return model.engine
                    before = self._occupants
                    try:
                        return await self._load_now(model)
                    except NoRoomError as error:
                        if not error.in_time:
                            raise
                        if not is_blocked:
                            is_blocked = True
                            until_loaded.enter_context(self.line.blocked(model.name))
                            logger.info("%s waits for room: %s", model.name, error)
                until = asyncio.get_running_loop().time() + RETRY_SECONDS
                while self._occupants == before and asyncio.get_running_loop().time() < until:
                    if not model.num_waiting:
                        raise NoRoomError("no request waits for the model any more", for_now=True)
                    await self.line.change(POLL_SECONDS)

    async def _load_now(self, model: Model) -> AsyncEngine:
        """Raises LoadFailedError, or NoRoomError if it does not fit beside the models that cannot be unloaded now."""
        model.error = None
        if model.engine is not None:
            await self._drop(model)
        gave_back = False
        while True:
            await self._keep_count(model)
            engine, started = self._begin(model), self.clock()
            try:
                await engine.wait_loaded()
            except asyncio.CancelledError:
                model.engine = None
                self.host.unload(engine.slot)
                raise
            except EngineUnavailableError:
                model.engine, failure = None, engine.failure
                if failure is None or not failure.lacks_memory:
                    logger.error("%s is not loaded: %s", model.name, engine.reason)
                    raise LoadFailedError(str(engine.reason)) from None
                logger.info("%s does not fit yet: %s", model.name, failure.reason)
                if failure.missing_bytes <= self._reclaimable_bytes():
                    if await self._unload_least_recent():
                        continue
                    if not gave_back and await self._give_back():
                        gave_back = True
                        continue
                fits_in_time = failure.missing_bytes <= self._reclaimable_bytes(in_time=True)
                raise NoRoomError(failure.reason, self._is_busy, fits_in_time and self._will_have_room) from None
            logger.info("%s is loaded", model.name)
            self.line.loaded(model.name, self.clock() - started)
            return engine

    async def _keep_count(self, model: Model) -> None:
        """Unload models until one more may be loaded. Raises NoRoomError."""
        most = self.limits.max_loaded
        while most is not None and len(self.loaded) >= most:
            if not await self._unload_least_recent():
                busy = ", ".join(repr(each.name) for each in self.loaded)
                message = f"{busy} run requests or are pinned, and --max-loaded-models is {most}"
                raise NoRoomError(message, self._is_busy, self._will_have_room)

    @property
    def _is_busy(self) -> bool:
        """Whether a loaded model has requests, so that there may be room later."""
        return any(not model.is_idle for model in self.loaded)

    @property
    def _occupants(self) -> dict[str, bool]:
        """The loaded models, with whether they may be unloaded. Nothing else gives another one room."""
        return {model.name: self._may_be_unloaded(model) for model in self.loaded}

    @property
    def _will_have_room(self) -> bool:
        """Whether a loaded model will be unloaded for another one when its requests have ended."""
        return any(not model.pinned for model in self.loaded)

    def _is_leaving(self, model: Model) -> bool:
        """Whether it takes no new requests, because it is to make room for another one."""
        return self.line.leaving([each.name for each in self.loaded if not each.pinned]) == model.name

    def _may_be_unloaded(self, model: Model) -> bool:
        """Whether a loaded model is idle, and its client does not go on soon."""
        if not self._has_ended(model):
            return False
        if asyncio.get_running_loop().time() < self._handed_over.get(model.name, 0.0):
            return False  # a request that has waited for it comes to its engine
        return self._is_leaving(model) or self.clock() - model.idle_since >= self.line.linger(model.name)

    def _has_ended(self, model: Model) -> bool:
        """Whether a loaded model has no requests. Those that wait until it has made room for another one do not
        count."""
        if model.pinned or model.engine is None or not model.engine.is_idle:
            return False
        return model.is_idle or self._is_leaving(model)

    def _reclaimable_bytes(self, in_time: bool = False) -> int:
        """Most bytes that the loaded models could free for another one. in_time: after their requests have ended."""
        return UNCOUNTED_BYTES + sum(model.reclaimable_bytes(in_time) for model in self.loaded)

    async def _unload_least_recent(self) -> bool:
        """Unload the idle model that was used least recently. Returns False if there is none, or it is to stay for
        now."""
        idle = filter(self._has_ended, self.loaded)
        oldest = min(idle, key=lambda model: model.idle_since, default=None)
        if oldest is None or not self._may_be_unloaded(oldest):
            return False
        await self._drop(oldest)
        return True

    async def _give_back(self) -> bool:
        """Free what the loaded models do not need of their KV pools. Returns whether it was anything."""
        engines = [model.engine for model in self.loaded if model.engine is not None]
        return any(await asyncio.gather(*(engine.give_back() for engine in engines)))

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
        await self._drop(model)

    async def _drop(self, model: Model) -> None:
        engine = model.forget_engine()
        assert engine is not None
        await engine.unload()
        self.line.unloaded(model.name)
        logger.info("%s is unloaded", model.name)

    async def _unload_idle(self, seconds: float) -> None:
        """seconds: the shortest time after which a model is unloaded, unless it is idle just then."""
        with contextlib.suppress(EngineUnavailableError):
            await self.wait_loaded()
        for engine in self.engines:  # those that were loaded first have waited for the others
            engine.touch()
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), min(seconds, WATCH_SECONDS))
            self._is_idle.clear()
            for model in self.loaded:  # asked one by one: requests may come while another one is unloaded
                if model.is_idle and not self.seconds_left(model):
                    await self._drop(model)


def is_same(model: Model, found: Found) -> bool:
    """Whether the files of a model are these."""
    source = model.config.model
    try:
        if found.path == model.path_on_disk or full_name(source) == found.name:
            return True
        return Path(source_path(source) or source).expanduser().samefile(found.path)
    except (OSError, RuntimeError, ModelNotFoundError):  # there is no such file, or no such user: a repository
        return False


def registry_of(models: Sequence[Model], base: EngineConfig, pinned: Sequence[str] = (), **options: Any) -> Registry:
    """pinned: names of models. options: fields of Registry. Raises ValueError if two models have the same name, or
    another name is that of no model."""
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two models cannot both be named {twice!r} (NAME=MODEL gives another name)")
    registry = Registry({model.name: model for model in models}, base, **options)
    for alias, name in registry.aliases.items():
        if alias in names or name not in names:
            reason = "is a model's name already" if alias in names else f"stands for {name!r}, which is not served"
            raise ValueError(f"alias {alias!r} {reason}")
    for profile in registry.profiles.values():
        if (model := registry.served(profile.model)) is None or profile.model in registry.profiles:
            raise ValueError(f"profile {profile.name!r}: no model {profile.model!r} is served")
        if not model.kind.generates:
            raise ValueError(f"profile {profile.name!r}: {profile.model!r} does not generate text")
        model.profiles = (*model.profiles, profile.name)
    for name in pinned:
        if (model := registry.served(name)) is None:
            raise ValueError(f"--pin {name!r}: no such model is served")
        model.pinned = True
    return registry
