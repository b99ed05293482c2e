"""One model that is served by name, loaded or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.errors import EngineState
from mlxpaged.models.architectures import Source
from mlxpaged.models.kinds import Kind


class ModelState(str, Enum):
    AVAILABLE = "available"  # on this machine or on the hub, and loaded on first use
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"  # it could not be loaded, or its engine failed


@dataclass(eq=False)
class Model:
    """config: of its engine. pinned: it is never unloaded to make room. engine: None if it is not loaded. error: of the
    last load. used_at: Unix time of the last request. is_found: whether no flag names it, but a request has."""

    name: str
    config: EngineConfig
    pinned: bool = False
    engine: AsyncEngine | None = None
    error: str | None = None
    used_at: int | None = None
    size_bytes: int | None = None  # of its weights on the disk; None if it is not known
    kind_on_disk: Kind | None = None  # by its files; None if it is not known
    source_on_disk: Source | None = None  # likewise
    path_on_disk: Path | None = None  # of its GGUF file, if its source names one; likewise
    num_waiting: int = 0  # requests that wait for the load, or are about to be submitted
    is_found: bool = False
    loading: asyncio.Task[AsyncEngine] | None = field(default=None, repr=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.config.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, and those with its adapters."""
        return self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)

    @property
    def state(self) -> ModelState:
        if self.engine is None:
            return ModelState.AVAILABLE if self.error is None else ModelState.FAILED
        is_draining = self.engine.state is EngineState.DRAINING
        if self.engine.state is EngineState.LOADING or (is_draining and self.engine.info is None):
            return ModelState.LOADING
        return ModelState.FAILED if self.engine.state is EngineState.DEAD else ModelState.LOADED

    @property
    def kind(self) -> Kind:
        if self.is_loaded and self.engine is not None and self.engine.info is not None:
            return self.engine.info.kind
        return self.kind_on_disk or (Kind.EMBEDDING if self.config.only_embeds else Kind.TEXT)

    @property
    def source(self) -> Source | None:
        """The source of its type's code, if it is known."""
        if self.is_loaded and self.engine is not None and self.engine.info is not None:
            return self.engine.info.source
        return self.source_on_disk

    @property
    def is_loaded(self) -> bool:
        return self.state is ModelState.LOADED

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and no request runs or is about to."""
        return self.is_loaded and self.engine is not None and self.engine.is_idle and not self.num_waiting

    @property
    def idle_since(self) -> float:
        """When it was used last, on the engine's clock."""
        assert self.engine is not None
        return self.engine.idle_since

    @property
    def is_gone(self) -> bool:
        """Whether no flag names it, it is not loaded, and its files have been deleted, or replaced by others."""
        return self.is_found and self.engine is None and self.loading is None and not os.path.exists(self.config.model)

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Until the end of the context, the model is not unloaded for another one."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    @property
    def failure(self) -> str | None:
        """Why it is FAILED."""
        if self.engine is not None and self.engine.state is EngineState.DEAD:
            return self.engine.reason
        return self.error

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of its weights, KV pools and recurrent states now; None if it is not loaded."""
        if not self.is_loaded or self.engine is None or self.engine.info is None or self.engine.stats is None:
            return None
        return self.engine.info.weight_bytes + self.engine.stats.kv_cache_bytes + self.engine.stats.state_bytes

    @property
    def reclaimable_bytes(self) -> int:
        """Most bytes that it could free for another model: all if it may be unloaded, else its KV pools."""
        if self.is_idle and not self.pinned:
            return self.memory_bytes or 0
        return self.engine.stats.kv_cache_bytes if self.engine is not None and self.engine.stats is not None else 0
