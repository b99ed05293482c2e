"""The only thread that uses MLX, from loading the weights to the last sample, and the queue of its commands."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mlxpaged.engine.builder import build_embedder, build_engine
from mlxpaged.engine.config import EngineConfig
from mlxpaged.engine.core import EngineCore
from mlxpaged.engine.memory import least_step, limit_freed_buffers, prepare_device_memory
from mlxpaged.engine.progress import Report, Stage, reporter
from mlxpaged.engine.request import RequestOutput
from mlxpaged.engine.status import EngineStats
from mlxpaged.engine.step_memory import measure_step
from mlxpaged.engine.swap_space import SwapSpaceError
from mlxpaged.models import ModelNotFoundError, Reserved, UnsupportedModelError, load_model

logger = logging.getLogger(__name__)


Command = Callable[[EngineCore], list[RequestOutput]]
"""Runs between two steps. Returns the last outputs of the requests that it ended."""


@dataclass(frozen=True)
class Callbacks:
    """Called on the engine thread. on_progress: while the model loads and kernels are compiled. on_step: once per step,
    with all its outputs. on_end: last, with the reason if the thread ended unexpectedly, else None."""

    on_progress: Report
    on_ready: Callable[[EngineCore], None]
    on_step: Callable[[list[RequestOutput], EngineStats], None]
    on_end: Callable[[str | None], None]


class EngineThread(threading.Thread):
    """Runs commands between steps, and steps while there is work. Without work it waits for commands, and looks about
    once a second whether it is to give back memory."""

    def __init__(self, config: EngineConfig, callbacks: Callbacks, clock: Callable[[], float] = time.monotonic) -> None:
        # A daemon: a step or a download must not delay an interpreter that quits.
        super().__init__(name="mlxpaged-engine", daemon=True)
        self._config = config
        self.callbacks = callbacks
        self._clock = clock
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def send(self, command: Command | None) -> None:
        """None ends the thread. Running requests end with an error."""
        self.commands.put(command)

    def run(self) -> None:
        try:
            prepare_device_memory()
            config, report = self._config, self.callbacks.on_progress
            reserved = Reserved(config.kv_cache_bytes or 0, least_step())
            loading = reporter(Stage.LOADING, report)
            names = config.model, config.served_model_name, config.tool_parser
            served = load_model(*names, loading, config.max_model_len, reserved, config.reranker, config.adapters)
            step_bytes = measure_step(served, config)
            limit_freed_buffers(step_bytes)
            embedder = build_embedder(config, served)
            core = build_engine(config, served, self._clock, *embedder, report, step_bytes)
            with contextlib.closing(core):
                self.callbacks.on_ready(core)
                self._serve(core)
        except (ModelNotFoundError, UnsupportedModelError, MemoryError, SwapSpaceError) as error:
            logger.critical("%s", error)
            self.callbacks.on_end(str(error))
        except BaseException as error:
            logger.critical("the engine thread failed", exc_info=error)
            self.callbacks.on_end(f"{type(error).__name__}: {error}")
        else:
            logger.info("engine stopped; KV blocks: %s", core.stats().scheduler.blocks)
            self.callbacks.on_end(None)

    def _serve(self, core: EngineCore) -> None:
        while True:
            outputs: list[RequestOutput] = []
            pause = core.pause()
            while pause or not self.commands.empty():
                try:
                    command = self.commands.get(timeout=pause)
                except queue.Empty:
                    break
                pause = 0.0
                if command is None:
                    self._deliver(core, outputs + core.abort_all("the server was shut down"))
                    return
                outputs += command(core)
                if outputs and self.commands.empty():
                    self._deliver(core, outputs)
                    outputs = []
            outputs += core.expire()
            if outputs:  # delivered before the step, so that clients do not wait for it
                self._deliver(core, outputs)
            if core.has_work():
                self._deliver(core, core.logged_step())
            elif core.rest():
                self._deliver(core, [])
            if core.embedder is not None and core.embeds():
                # An embedding waits for the device anyway, and its time must not count as that of the step in flight.
                if outputs := core.finish_in_flight_step():
                    self._deliver(core, outputs)
                core.embedder.step(alone=not core.has_work())
                self._deliver(core, [])

    def _deliver(self, core: EngineCore, outputs: list[RequestOutput]) -> None:
        self.callbacks.on_step(outputs, core.stats())
