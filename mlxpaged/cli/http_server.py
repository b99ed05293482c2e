"""Runs uvicorn, prints a banner when the model is loaded, and drains the server at SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import uvicorn
from starlette.applications import Starlette

from mlxpaged import __version__
from mlxpaged.cli.exit import exit_status
from mlxpaged.cli.http_protocol import HttpProtocol
from mlxpaged.cli.start_display import StartDisplay
from mlxpaged.cpu import blas
from mlxpaged.engine import AsyncEngine, EngineConfig, EngineInfo, EngineUnavailableError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DISPLAY_SECONDS = 0.1
"""Between two looks at how far the start is."""
GRACE_SECONDS = 2.0
"""The events of the last request get this time to reach the client. Then open connections are closed."""


class HttpServer(uvicorn.Server):
    """Shuts down in this order: HTTP takes no new connections; running requests finish within `drain_timeout` seconds
    or end with an error; the engine thread stops. A second signal ends the requests at once."""

    def __init__(self, app: Starlette, listeners: Sequence[socket.socket], drain_timeout: float) -> None:
        """listeners: the main socket, and the one for Ollama's clients if there is one."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,  # our log has the request's id, and no query, which may contain a key
                loop="uvloop",  # tokens reach clients sooner than with asyncio's loop
                http=HttpProtocol,
                ws="none",
                lifespan="on",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(drain_timeout + 2 * GRACE_SECONDS),
            )
        )
        self._engine: AsyncEngine | None = app.state.server.engine
        self._needs_key = app.state.server.keys is not None
        self._listeners = list(listeners)
        self._drain_timeout = drain_timeout
        self._exit_status = 0
        self.url, *others = map(url_of, self._listeners)
        self._ollama_url = others[0] if others else None
        self._tasks: list[asyncio.Task[None]] = []
        self.servers = []  # uvicorn sets it at its start; a signal can come earlier

    def run_until_signal(self) -> int:
        """Returns the exit status: 0 after a signal, 1 if the model cannot be served."""
        self.run(sockets=self._listeners)
        logger.info("bye")
        return exit_status(self._engine, self._exit_status)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's method, which raises the signal again after the shutdown and so changes the status."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, name: str) -> None:
        if self.should_exit:
            logger.warning("%s again: not waiting for running requests", name)
            if self._engine is not None:
                self._engine.end_all("the server is shutting down")
            return
        for server in self.servers:  # at once: uvicorn looks at `should_exit` ten times a second
            server.close()
        running = self._engine.num_unfinished if self._engine else 0
        logger.info("%s: no new requests; %d running ones have up to %.0f s", name, running, self._drain_timeout)
        self.should_exit = True
        self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        """End the running requests, then close the other connections, for example one with half a body."""
        if self._engine is not None and await self._engine.drain(self._drain_timeout):
            logger.info("drained: no request is running")
        await asyncio.sleep(GRACE_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        urls = " and ".join(map(url_of, self._listeners))
        logger.info("listening on %s, BLAS: %s", urls, blas.describe())
        if self._engine is None:
            print(f"mlxpaged {__version__} without a model at {urls}", flush=True)
        else:
            self._tasks.append(asyncio.ensure_future(self._announce(self._engine)))

    async def _announce(self, engine: AsyncEngine) -> None:
        display = StartDisplay(sys.stderr)
        loaded = asyncio.ensure_future(engine.wait_loaded())
        while not loaded.done():
            await asyncio.wait([loaded], timeout=DISPLAY_SECONDS)
            display.show(engine.progress)
        display.end()
        try:
            loaded.result()
        except EngineUnavailableError as error:
            if not self.should_exit:
                print(f"mlxpaged: {error}", file=sys.stderr, flush=True)
                self._exit_status = 1
                self.should_exit = True
            return
        gc.collect()
        gc.freeze()  # a full collection of the libraries' 100,000 objects would block every stream
        if engine.info is not None and not self.should_exit:
            print(banner(engine.info, engine.config, self.url, self._needs_key, self._ollama_url), flush=True)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(info: EngineInfo, config: EngineConfig, url: str, needs_key: bool, ollama_url: str | None = None) -> str:
    body = {"model": info.model, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    weights, pool = megabytes(info.weight_bytes), megabytes(info.start_kv_cache_bytes)
    if info.start_kv_cache_bytes < info.kv_cache_bytes:
        pool += f", grows to {megabytes(info.kv_cache_bytes)}"
    extra, slots = "", info.num_swap_slots
    if slots:
        place, size = config.swap_dir or "memory", megabytes(slots * info.kv_cache_bytes // info.num_blocks)
        tokens = slots * info.block_size // len(info.groups)
        extra += f"  swap      {size} in {place}: {slots} blocks, {tokens} tokens\n"
    if info.kernels_off is not None:
        extra += f"  slower    the Metal kernels are off: {info.kernels_off}\n"
    if slow := info.num_layers_per_sequence:
        extra += f"  slower    {slow} of {info.num_layers} layers run once per sequence, without a prefix cache\n"
    if not info.groups.keeps_all:
        windows = Counter(window for window in info.groups.windows if window is not None)
        counts = ", ".join(f"{count} with a window of {window} tokens" for window, count in windows.items())
        extra += f"  groups    {len(info.groups)} cache groups: {counts}\n"
    if (states := info.states).bytes_per_state:
        one, total = megabytes(states.bytes_per_state), megabytes(states.nbytes)
        extra += f"  states    {one} for each sequence: {states.max_num_seqs} sequences and "
        extra += f"{states.num_checkpoints} checkpoints, {total} reserved\n"
    if (model := info.embedding_model) is not None:
        extra += f"  embedding {model.name}: {model.dimensions} dimensions, inputs up to {model.max_tokens} tokens\n"
    ollama = "" if ollama_url is None else f"  ollama    {ollama_url}\n"
    return f"""
mlxpaged {__version__}
  model     {info.model}: {info.num_layers} layers, {weights} of weights, context {info.longest}
  KV cache  {pool}: up to {info.num_blocks} blocks of {info.block_size} tokens, {info.backend} attention
{extra}  batch     up to {config.max_num_seqs} sequences
  address   {url}
{ollama}
Try it:
  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
    -d '{json.dumps(body)}'
"""


def megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
