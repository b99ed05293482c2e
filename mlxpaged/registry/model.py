"""One model that is served by name, loaded or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mlxpaged.core.engine.errors import EngineState
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.file_facts import FileFacts
from mlxpaged.models.files.architectures import Source
from mlxpaged.models.files.kinds import Kind
from mlxpaged.models.sources.gguf.choice import split_name
from mlxpaged.registry.catalog import Found
from mlxpaged.registry.facts import Facts, engine_facts, expected_facts


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
    found: Found | None = None  # its files; None if they are not known
    files: FileFacts | None = None  # what they say; likewise
    told: Facts | None = None  # what its last engine has said; None if it was not loaded since its files changed
    keep_alive: float | None = None  # seconds, as the last request has asked; None: as --idle-unload says
    num_waiting: int = 0  # requests that wait for the load, or are about to be submitted
    is_found: bool = False
    profiles: tuple[str, ...] = ()  # names of those of this model
    loading: asyncio.Task[AsyncEngine] | None = field(default=None, repr=False)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.config.adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, those with its adapters, and those of its profiles."""
        return self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters), *self.profiles

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
        if (facts := self.facts) is not None:
            return facts.kind
        default = Kind.EMBEDDING if self.config.only_embeds else Kind.TEXT
        return default if self.found is None else self.found.kind

    @property
    def source(self) -> Source | None:
        """The source of its type's code, if it is known."""
        if self.is_loaded and self.engine is not None and self.engine.info is not None:
            return self.engine.info.source
        return None if self.files is None else self.files.source

    @property
    def facts(self) -> Facts | None:
        """What it can do, by its engine or, before it is loaded, by its files. None if neither tells."""
        if self.is_loaded and self.engine is not None and self.engine.info is not None:
            return engine_facts(self.engine.info)
        if self.told is not None:
            return self.told
        return None if self.files is None else expected_facts(self.files, self.config)

    @property
    def size_bytes(self) -> int | None:
        """Bytes of its weights on the disk, or if the files are not known, in memory. None if neither is known."""
        if self.found is not None:
            return self.found.size_bytes
        return None if self.engine is None or self.engine.info is None else self.engine.info.weight_bytes

    @property
    def path_on_disk(self) -> Path | None:
        """Its GGUF file, if its source names one. Of several files, another one may be chosen later."""
        return self.found.path if self.found is not None and split_name(self.config.model)[1] else None

    def look(self, found: Found | None) -> None:
        """Read what its files say, if they have changed. found: where they are. It reads the disk."""
        self.found = found or self.found
        if self.found is None or not self.found.path.exists():
            return
        files = self.found.facts(self.config.chat_template, self.config.tool_parser)
        if self.files not in (None, files) and self.engine is None:
            self.told = None
        self.files = files

    def forget_engine(self) -> AsyncEngine | None:
        """Its engine, which is to be unloaded. What it has said of the model stays."""
        engine, self.engine, self.keep_alive = self.engine, None, None
        if engine is not None and engine.info is not None:
            self.told = engine_facts(engine.info)
        return engine

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

    def reclaimable_bytes(self, in_time: bool = False) -> int:
        """Most bytes that it could free for another model: all if it may be unloaded, else its KV pools. in_time: after
        its requests have ended."""
        if (self.is_idle or in_time) and not self.pinned:
            return self.memory_bytes or 0
        return self.engine.stats.kv_cache_bytes if self.engine is not None and self.engine.stats is not None else 0
