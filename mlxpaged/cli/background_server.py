"""A server that a command starts for itself, as a child process, and ends again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from mlxpaged.cli.client import Client, ServerError
from mlxpaged.cli.os_errors import sentence
from mlxpaged.cli.running_servers import server_of
from mlxpaged.interpreter import PYTHON

POLL_SECONDS = 0.05
END_SECONDS = 10.0
"""A server without requests ends in 0.2 s. After this time it is killed."""


class BackgroundServer:
    """Listens on a free port of this machine. Its standard input is a pipe from this process, and it ends with the
    pipe: also if this process is killed."""

    def __init__(self, model: str | None, config: str | None, more: Sequence[str] = ()) -> None:
        """model: as for `mlxpaged serve`; None: what the user has set for it, or the demo model. config: the file of
        --config, if the user has named one. more: further flags of `mlxpaged serve`. Raises ServerError if there is no
        room for its log."""
        # Another server may have the port that is configured for Ollama's clients, and the directory.
        own = ["--port", "0", "--ollama-port", "0", "--data-dir", "0"]
        flags = ["--host", "127.0.0.1", *own, "--until-eof", "--log-level", "warning"]
        file = [] if config is None else ["--config", config]
        named = [] if model is None else ["--model", model]
        command = [*PYTHON, "-m", "mlxpaged", *file, "serve", *flags, *more, *named]
        try:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        except OSError as error:
            raise ServerError(f"no server can be started: {sentence(error)}") from None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for this process alone: it ends an answer, not the server
        )

    def wait_ready(self, show: Callable[[str], None]) -> str:
        """Returns the address when the model is loaded. show: is called with how far it is. Raises ServerError with the
        server's own message if it cannot serve."""
        show("starting a server")
        while (server := server_of(self._process.pid)) is None:
            self._check_running()
            time.sleep(POLL_SECONDS)
        wait_loaded(Client(server.url), show, self._check_running)
        return server.url

    def _check_running(self) -> None:
        if self._process.poll() is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").splitlines()
            own = ("mlxpaged: ", "mlxpaged serve: ")
            said = [line.partition(": ")[2] for line in lines if line.startswith(own)]
            raise ServerError("\n".join(said or lines[-5:]) or "the server has ended without a message")

    def end(self) -> None:
        """Ctrl-C kills the server instead of waiting for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()  # does nothing if it has ended
            self._process.wait()
            self._log.close()


def wait_loaded(client: Client, show: Callable[[str], None], check_running: Callable[[], None] = lambda: None) -> None:
    """Returns when the server has loaded its model. check_running: raises an error if the server has ended."""
    while True:
        try:
            health = client.health()
        except ServerError:
            check_running()
            raise
        if health["status"] == "ok":
            return
        if health["status"] != "loading":
            check_running()
            raise ServerError(health.get("reason") or f"the server at {client.url} is {health['status']}")
        show(health.get("progress") or "loading")
        check_running()
        time.sleep(POLL_SECONDS)


def end_with_standard_input() -> None:
    """End this process, as SIGTERM does, when its standard input is closed. Returns at once."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
