"""What it costs to bring the tokens of every step to streams over HTTP. For engine.py."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from mlxpaged.api.app import create_app
from mlxpaged.cli.http_server import HttpServer
from mlxpaged.cli.serve import listen
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.registry import Registry

CLIENTS = Path(__file__).with_name("delivery_clients.py")
POLL_SECONDS = 0.02
ENDING_STEPS = 2048
"""Tokens that an answer has beside those that are measured: while all streams begin, and while one looks."""


class HandOver:
    """Seconds that the engine's thread spends on telling the event loop of its steps."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.seconds = 0.0
        self._inner: Callable[..., None] = engine._hand_over
        setattr(engine, "_hand_over", self._timed)  # noqa: B010 - a method, which mypy would have left alone

    def _timed(self, *args: Any) -> None:
        start = time.perf_counter()
        self._inner(*args)
        self.seconds += time.perf_counter() - start


def delivery_seconds(config: EngineConfig, streams: int, steps: int) -> tuple[float, float]:
    """For each of `steps` decode steps: seconds of the engine's thread to hand its tokens over, and CPU seconds of the
    event loop's thread from there to the sockets. `streams` chats run at once; their clients are
    another process. Raises RuntimeError if that ends."""
    with contextlib.redirect_stdout(io.StringIO()):  # the server's banner
        return uvloop.run(served(config, streams, steps))


async def served(config: EngineConfig, streams: int, steps: int) -> tuple[float, float]:
    listener = listen("127.0.0.1", 0)
    registry = Registry.of(config)
    server = HttpServer(create_app(registry), [listener], drain_timeout=0)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(POLL_SECONDS)
    await registry.wait_loaded()
    engine = registry.default.engine
    assert engine is not None
    assert engine.info is not None
    arguments = (listener.getsockname()[1], engine.info.model, streams, steps + ENDING_STEPS)
    client = await asyncio.create_subprocess_exec(sys.executable, str(CLIENTS), *map(str, arguments))
    try:
        return await measured(engine, client, streams, steps)
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
        await client.wait()
        await engine.drain(0)
        server.should_exit = True
        await serving


async def measured(
    engine: AsyncEngine, client: asyncio.subprocess.Process, streams: int, steps: int
) -> tuple[float, float]:
    """While all streams decode. If one ends before all steps are measured, it begins again."""
    hand_over, done = HandOver(engine), 0
    while done < steps:
        if client.returncode is not None:
            raise RuntimeError(f"{streams} streams did not run")
        await asyncio.sleep(POLL_SECONDS)
        first, cpu, seconds = stats_of(engine).steps_total, time.thread_time(), hand_over.seconds
        while all_decode(engine, streams) and done < steps:
            await asyncio.sleep(POLL_SECONDS)
            done = stats_of(engine).steps_total - first
    return (hand_over.seconds - seconds) / done, (time.thread_time() - cpu) / done


def stats_of(engine: AsyncEngine) -> EngineStats:
    """As of its last step."""
    assert engine.stats is not None
    return engine.stats


def all_decode(engine: AsyncEngine, streams: int) -> bool:
    """Whether all prompts are computed, as far as the tokens show."""
    stats = stats_of(engine)
    return stats.scheduler.running == streams and stats.generated_tokens_total >= 2 * streams
