"""The models that are served, from the start of the server to its end. They share one engine thread and the machine's
memory. names.py finds one by its name, loader.py loads it, occupants.py makes room for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.core.engine.request import EndedRequest, Request, RequestOutput
from mlxpaged.core.engine.stall import Stall
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.engine_thread import EngineHost, EngineThread
from mlxpaged.engine.load_journal import LoadJournal
from mlxpaged.engine.watchdog import StallLimits, Watchdog
from mlxpaged.engine_config import EngineConfig
from mlxpaged.progress import Progress
from mlxpaged.registry.catalog import Catalog
from mlxpaged.registry.loader import Loader
from mlxpaged.registry.model import Model
from mlxpaged.registry.names import Names
from mlxpaged.registry.occupants import Limits, Occupants
from mlxpaged.registry.profile import Profile
from mlxpaged.registry.swaps import SwapLine

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Seconds between two checks of which models have been idle for too long."""


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
    limits: Limits = field(default_factory=Limits)
    catalog: Catalog = field(default_factory=Catalog)
    clock: Callable[[], float] = time.monotonic
    watchdog: StallLimits | None = None
    engine_host: EngineHost | None = None
    loads: LoadJournal | None = None

    def __post_init__(self) -> None:
        self.host: EngineHost = self.engine_host or EngineThread(self.clock, self.loads)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._on_output: Callable[[str, Request, RequestOutput], None] | None = None
        self._started = False
        self._line = SwapLine(self.limits.swap_wait, self.clock)
        self.names = Names(self.models, self.aliases, self.profiles, self.catalog, self.base)
        self._occupants = Occupants(self.models, self.limits, self._line, self.clock)
        self.loader = Loader(self._occupants, self._line, self.host, self._begin, self.clock)
        self._watcher: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()  # set when a model may have to be unloaded
        self._watchdog: Watchdog | None = None

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
        self.loader.start(self.loop)
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
        self._line.idle(model.name)

    def _raise_alarm(self, stall: Stall) -> None:
        """Raises the alarm, on the watchdog's thread."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._end_waiting, stall)

    def _end_waiting(self, stall: Stall) -> None:
        """The engine thread is stalled: end what waits for it."""
        for engine in self.engines:
            engine.end_waiting(str(stall), () if stall.size is None else stall.size.request_ids)
        self.loader.end_waiting(str(stall))

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
                    await self._occupants.drop(model)

    async def drain(self, timeout: float, reason: str = "the server is shutting down") -> bool:
        """Take no more requests, and wait until the others are done. Returns False if some had to be ended. Loads end,
        and requests that wait for them are refused: a load can take an hour if it downloads the model."""
        self.loader.refuse(reason)
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
        return self.names.default

    @property
    def engines(self) -> list[AsyncEngine]:
        """Those that are loaded or loading."""
        return self._occupants.engines

    @property
    def loaded(self) -> list[Model]:
        return self._occupants.loaded

    @property
    def num_unfinished(self) -> int:
        return sum(engine.num_unfinished for engine in self.engines)

    @property
    def state(self) -> EngineState:
        """STALLED while work of the engine thread has not ended in time; LOADING until the models of the start are
        loaded, and while the default model's ranks start again; DEAD if the default model's engine failed."""
        if self.loader.draining is not None:
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
        if self.loader.draining is not None:
            return self.loader.draining
        if (stall := self.stall) is not None:
            return str(stall)
        return None if self.default.engine is None else self.default.engine.reason

    @property
    def progress(self) -> Progress | None:
        """The progress of the model that is being loaded, or of the one that was loaded last at the start."""
        engines = sorted(self.engines, key=lambda engine: engine.state is not EngineState.LOADING)
        return next((engine.progress for engine in engines if engine.progress is not None), None)


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
        if (model := registry.names.served(profile.model)) is None or profile.model in registry.profiles:
            raise ValueError(f"profile {profile.name!r}: no model {profile.model!r} is served")
        if not model.kind.generates:
            raise ValueError(f"profile {profile.name!r}: {profile.model!r} does not generate text")
        model.profiles = (*model.profiles, profile.name)
    for name in pinned:
        if (model := registry.names.served(name)) is None:
            raise ValueError(f"--pin {name!r}: no such model is served")
        model.pinned = True
    return registry
