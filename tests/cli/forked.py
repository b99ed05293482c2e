"""`mlxpaged` forked from a process that has imported it: imports are nine tenths of the CPU time of a start."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpaged.cli import http_server, main, serve  # noqa: F401  (imported before the fork)
from mlxpaged.cli.bench import command  # noqa: F401
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.engine import async_engine
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig

IS_SUPPORTED = sys.platform == "linux"
"""A Mac's frameworks do not work in a forked process."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def slow_down() -> None:
    """While there is a file `slow` in the home directory, each step takes a tenth of a second longer."""
    forward = ModelRunner.forward

    def slow(*args: Any, **more: Any) -> Any:
        if Path("~/slow").expanduser().exists():
            time.sleep(0.1)
        return forward(*args, **more)

    ModelRunner.forward = slow  # type: ignore[method-assign]


DEADLY_SEED = 4_600_000_000_000_000_009
"""A request with this seed kills the server when the engine is to get it."""


DEADLY_MODEL, ENDLESS_MODEL = "deadly", "endless"
"""A model of the first name kills the server while it is loaded. The load of one of the second name does not end."""


def die_when_asked_to() -> None:
    submit, load = AsyncEngine.submit, async_engine.load_core

    def deadly_load(config: EngineConfig, *args: Any) -> Any:
        if config.served_model_name == DEADLY_MODEL:
            os.kill(os.getpid(), signal.SIGKILL)
        while config.served_model_name == ENDLESS_MODEL:
            time.sleep(1)
        return load(config, *args)

    def deadly(self: AsyncEngine, requests: Any) -> Any:
        if any(request.params.seed == DEADLY_SEED for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        return submit(self, requests)

    AsyncEngine.submit = deadly  # type: ignore[method-assign]
    async_engine.load_core = deadly_load


def run(args: tuple[str, ...], env: dict[str, str], stdout: Path, stderr: Path) -> None:
    """The command in this process, until its end."""
    os.environ.clear()
    os.environ.update(env)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    slow_down()
    die_when_asked_to()
    sys.exit(main(args))


class ForkedProcess:
    """A running command, with as much of `subprocess.Popen` as the tests need."""

    def __init__(self, args: tuple[str, ...], env: Mapping[str, str], stdout: Path, stderr: Path) -> None:
        self._args = args
        self._process = CONTEXT.Process(target=run, args=(args, dict(env), stdout, stderr), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._args, timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
