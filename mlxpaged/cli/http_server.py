"""Runs uvicorn, prints a banner when the model is loaded, and drains the server at SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from mlxpaged import __version__
from mlxpaged.api.access.key_file import KeyFileError
from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.server import Server
from mlxpaged.cli.banner import banner
from mlxpaged.cli.http_protocol import HttpProtocol
from mlxpaged.cli.os_errors import sentence
from mlxpaged.cli.smaller_model import smaller
from mlxpaged.cli.start_display import StartDisplay
from mlxpaged.core.engine.errors import EngineUnavailableError
from mlxpaged.cpu import blas
from mlxpaged.durable_files import DirectoryInUseError
from mlxpaged.engine.garbage import freeze
from mlxpaged.log_writer import Writer
from mlxpaged.process_memory import return_freed_memory
from mlxpaged.registry.registry import Registry

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DISPLAY_SECONDS = 0.1
"""Seconds between two checks of how far the start is."""
GRACE_SECONDS = 2.0
"""The events of the last request get this time to reach the client. Then open connections are closed."""
RETURN_SECONDS = 60.0
"""Seconds between two times that freed memory is returned to the system."""


def run_server(
    registry: Registry | None,
    listeners: Sequence[socket.socket],
    http: HttpConfig,
    data_dir: Path | None,
    drain_timeout: float,
) -> int:
    """Serve until a signal. registry: None for a server without a model. listeners: as for `HttpServer`. Returns the
    exit status, 1 with a message if the file of API keys or `data_dir` cannot be used."""
    try:
        clock = time.monotonic if registry is None else registry.clock
        app = create_app(registry, clock, http, data_dir)
    except (KeyFileError, DirectoryInUseError, OSError) as error:
        for listener in listeners:
            listener.close()
        place = "" if isinstance(error, KeyFileError) else f"--data-dir {data_dir}: "
        print(f"mlxpaged: {place}{sentence(error)}", file=sys.stderr)
        return 1
    return HttpServer(app, listeners, drain_timeout).run_until_signal()


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
                http=HttpProtocol,
                ws="none",
                lifespan="on",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(drain_timeout + 2 * GRACE_SECONDS),
            )
        )
        self._shared: Server = app.state.server
        self._registry = self._shared.registry
        self._needs_key = self._shared.keys is not None
        self._listeners = list(listeners)
        self._drain_timeout = drain_timeout
        self._exit_status = 0
        self._stdout = Writer(1)
        self.url, *others = map(url_of, self._listeners)
        self._ollama_url = others[0] if others else None
        self._tasks: list[asyncio.Task[None]] = []
        self.servers = []  # uvicorn sets it at its start; a signal can come earlier

    def run_until_signal(self) -> int:
        """Run on the event loop with which the models were started. Returns the exit status: 0 after a signal, 1 if the
        model cannot be served."""
        loop = uvloop.new_event_loop() if self._registry is None else self._registry.loop
        assert isinstance(loop, uvloop.Loop)
        uvloop.run(self.serve(sockets=self._listeners), loop_factory=lambda: loop)
        if not self._exit_status:
            logger.info("bye")
        self._stdout.flush()
        return self._exit_status

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
            if self._registry is not None:
                self._registry.end_all("the server is shutting down")
            return
        for server in self.servers:  # at once: uvicorn looks at `should_exit` ten times a second
            server.close()
        running = self._registry.num_unfinished if self._registry else 0
        logger.info("%s: no new requests; %d running ones have up to %.0f s", name, running, self._drain_timeout)
        self.should_exit = True
        self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        """End the running requests, then close the other connections, for example one with half a body."""
        self._shared.is_ending = True
        if self._registry is not None and await self._registry.drain(self._drain_timeout):
            logger.info("drained: no request is running")
        await self._end_answers()

    async def _end_answers(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        for task in self.server_state.tasks:
            task.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        urls = " and ".join(map(url_of, self._listeners))
        self._tasks.append(asyncio.ensure_future(return_freed_memory_regularly()))
        listening = f"listening on {urls}, BLAS: {blas.describe()}"
        if self._registry is None:
            logger.info("%s", listening)
            self._stdout.write(f"mlxpaged {__version__} without a model at {urls}\n")
        else:
            self._tasks.append(asyncio.ensure_future(self._announce(self._registry, listening)))

    async def _announce(self, registry: Registry, listening: str) -> None:
        display = StartDisplay(sys.stderr, listening)
        loaded = asyncio.ensure_future(registry.wait_loaded())
        while not loaded.done():
            await asyncio.wait([loaded], timeout=DISPLAY_SECONDS)
            display.show(registry.progress)
        display.end(is_loaded=loaded.exception() is None)
        try:
            loaded.result()
        except EngineUnavailableError as error:
            if not self.should_exit:
                print(f"mlxpaged: {error}{instead(registry)}", file=sys.stderr, flush=True)
                self._exit_status = 1
                self.should_exit = self._shared.is_ending = True
                await registry.drain(GRACE_SECONDS, str(error))  # ends the stream of the page too
                await self._end_answers()
            return
        freeze()
        if not self.should_exit:
            self._stdout.write(f"{banner(registry, self.url, self._needs_key, self._ollama_url)}\n")


async def return_freed_memory_regularly() -> None:
    """glibc has heaps for several threads. Under a mixed load they fragment: in half an hour, their free parts grew
    from 12 to 33 MB, while what was in use stayed at 45 MB. It takes a few ms on a thread of its own."""
    while True:
        await asyncio.sleep(RETURN_SECONDS)
        await asyncio.to_thread(return_freed_memory)


def instead(registry: Registry) -> str:
    """Returns the end of the message about a start that has failed: a model that fits, if one was too large."""
    failures = [model.engine.failure for model in registry.models.values() if model.engine is not None]
    return smaller() if any(each is not None and each.missing_bytes for each in failures) else ""


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
