"""Handles GET /v1/status/stream: what the page shows of the server, twice a second.

All watchers get the same snapshot. Without a watcher nothing is computed.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.phase_tracker import PhaseTracker
from mlxpaged.api.recent_latencies import WINDOW_SECONDS
from mlxpaged.api.server import Server
from mlxpaged.api.status import describe, describe_engine, model_fields
from mlxpaged.api.streaming import EVENTS, EventStream, event
from mlxpaged.core.engine.errors import EngineBusyError, EngineState, EngineUnavailableError
from mlxpaged.registry.model import Model

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.5
MAX_SHARE = 0.01
"""The share of the CPU time that goes into snapshots. If one takes more than this share of the period, the period
grows."""
MAX_CELLS = 8192
"""Cells of the map of blocks. A larger pool has several blocks in a cell."""


class ModelWatch:
    """Makes the snapshots of one model, and remembers what it needs of the previous ones."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._phases = PhaseTracker()
        self._counted: tuple[float, int] | None = None  # time and generated tokens of the last snapshot
        self.busy_seconds = 0.0  # CPU time of the last snapshot

    async def snapshot(self) -> dict[str, Any]:
        """Waits for the end of the step that runs. A model whose engine cannot answer is described by its state."""
        model, engine = self._model, self._model.engine
        found = model_fields(model) | {"reason": model.failure, "progress": None}
        self.busy_seconds = 0.0
        if engine is None or not model.is_loaded or engine.stats is None:
            progress = None if engine is None or engine.progress is None else str(engine.progress)
            return found | {"progress": progress}
        try:
            seen = await engine.snapshot()
        except (EngineUnavailableError, EngineBusyError) as error:
            return found | {"reason": str(error)}
        started = time.thread_time()
        status, stats = seen.status, engine.stats
        listed = [*status.running, *status.waiting]
        unfinished = status.scheduler.running + status.scheduler.waiting
        self._phases.update(listed, all_listed=len(listed) == unfinished)
        ended = [(track, each) for track in self._phases.ended for each in describe([track.last])]
        found |= describe_engine(engine, status)
        found |= {
            "running": status.scheduler.running,
            "waiting": status.scheduler.waiting,
            "requests": [each | {"segments": self._phases.segments(each["request_id"])} for each in describe(listed)],
            "ended": [each | {"segments": track.describe()} for track, each in ended],
            "tokens_per_second": self._tokens_per_second(engine.clock(), stats.generated_tokens_total),
            "prompt_tokens": stats.scheduler.prompt_tokens_total,
            "prefix_hit_tokens": stats.scheduler.prefix_hit_tokens_total,
            "preemptions": stats.scheduler.preemptions_total,
        }
        if seen.block_states:
            found["map"] = block_map(seen.block_states)
        self.busy_seconds = seen.seconds + time.thread_time() - started
        return found

    def _tokens_per_second(self, now: float, tokens: int) -> float | None:
        """The rate since the previous snapshot, if that is not long ago. A model that was loaded again counts anew."""
        previous, self._counted = self._counted, (now, tokens)
        if previous is None or not 0 < now - previous[0] < 10 * PERIOD_SECONDS or tokens < previous[1]:
            return None
        return (tokens - previous[1]) / (now - previous[0])


def block_map(states: bytes) -> dict[str, Any]:
    """states: as `BlockPool.states`. Returns the cells in base64, each with the largest state of its blocks."""
    per_cell = -(-len(states) // MAX_CELLS)
    if per_cell > 1:
        padded = np.zeros(-(-len(states) // per_cell) * per_cell, np.uint8)
        padded[: len(states)] = np.frombuffer(states, np.uint8)
        states = padded.reshape(-1, per_cell).max(axis=1).tobytes()
    return {"blocks_per_cell": per_cell, "cells": base64.b64encode(states).decode()}


class StatusStream:
    """One per app. A task makes the snapshots while there is a watcher."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._watches: dict[Model, ModelWatch] = {}
        self._watchers = 0
        self.task: asyncio.Task[None] | None = None  # while there is a watcher
        self._latest: str | None = None
        self._changed = asyncio.Event()  # of the latest event; each event has its own

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields the events from the next one on. A slow watcher misses some, and delays no other."""
        self._watchers += 1
        if self.task is None:
            self.task = asyncio.ensure_future(self._run())
        try:
            while await self._changed.wait() and self._latest is not None:
                yield self._latest
        finally:
            self._watchers -= 1
            if self._watchers == 0 and self.task is not None:
                self.task.cancel()
                self.task = None

    async def _run(self) -> None:
        self._watches = {}  # what happened without a watcher is not known
        try:
            previous = 0.0
            while not self._is_over():
                text, busy_seconds = await self.event()
                self._publish(text)
                # The smaller one of two, because the first snapshot takes longer.
                await asyncio.sleep(max(PERIOD_SECONDS, min(previous, busy_seconds) / MAX_SHARE))
                previous = busy_seconds
        except Exception:
            logger.exception("the status stream failed")
        self.task = None
        self._publish(None)

    def _is_over(self) -> bool:
        """A server that shuts down waits for its streams."""
        registry = self._server.registry
        if registry is None:
            return self._server.is_ending
        return registry.state is EngineState.DRAINING and registry.num_unfinished == 0

    def _publish(self, text: str | None) -> None:
        self._latest = text
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def event(self) -> tuple[str, float]:
        """Returns an event, and the CPU seconds that it took."""
        server = self._server
        models = [] if server.registry is None else server.registry.models.values()
        shown = [model for model in models if model.engine is not None]
        self._watches = {model: self._watches.get(model) or ModelWatch(model) for model in shown}
        found = [await watch.snapshot() for watch in self._watches.values()]
        started = time.thread_time()
        keys = {} if server.keys is None else {"keys": server.keys.usage.describe()}
        rates = [each.get("tokens_per_second") for each in found]
        text = event(
            {
                "time": time.time(),
                "uptime_seconds": server.uptime,
                "models": found,
                "rates": {
                    "tokens_per_second": sum(rate for rate in rates if rate is not None),
                    "window_seconds": WINDOW_SECONDS,
                    **server.metrics.recent.quantiles(server.now),
                },
                **keys,
                "refusals": [vars(refusal) for refusal in reversed(server.refusals)],
            }
        )
        busy_seconds = sum(watch.busy_seconds for watch in self._watches.values())
        return text, busy_seconds + time.thread_time() - started


async def stream(request: Request) -> Response:
    if request.method == "HEAD":  # the answer has no events by which its client could see that it goes on
        return Response(media_type=EVENTS)
    events: StatusStream = request.app.state.status_stream
    return EventStream(events.events(), lambda: None, EVENTS)
