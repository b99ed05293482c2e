"""Runs `mlxpaged bench`, from its flags to its exit status."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import uvloop
from rich.console import Console

from mlxpaged.cli.banner import megabytes
from mlxpaged.cli.bench.defaults import complete_flags
from mlxpaged.cli.bench.plan import NoRoomError, Plan, make_plan
from mlxpaged.cli.bench.progress import progress_display
from mlxpaged.cli.bench.report import json_report, report_console, table
from mlxpaged.cli.doctor.machine import machine
from mlxpaged.cli.engine_flags import engine_config
from mlxpaged.cli.exit import exit_status
from mlxpaged.cli.logs import set_up
from mlxpaged.cli.parser import INTERRUPTED
from mlxpaged.core.engine.errors import EngineBusyError, EngineUnavailableError, RequestFailedError
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import UnsupportedModelError

LOADING_STOP_SECONDS = 1.0
STOP_SECONDS = 10.0
UNPRINTABLE = "the figures cannot be printed"


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if the model cannot be measured, 2 for bad flags, 130 after SIGINT."""
    set_up(args.log_level)
    try:
        config = engine_config(args)
        complete_flags(args, config.max_num_seqs)
        bench = Bench(config, args)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        status = uvloop.run(bench.run())
    except KeyboardInterrupt:  # a second SIGINT, after the figures
        status = INTERRUPTED
    return exit_status(status)


REASONS = EngineUnavailableError, EngineBusyError, RequestFailedError, NoRoomError, UnsupportedModelError
"""Errors whose message is the reason why nothing was measured."""


class Bench:
    """One run of the command."""

    def __init__(self, config: EngineConfig, args: argparse.Namespace) -> None:
        self.engine = AsyncEngine(config)
        self._args = args
        self._console = report_console(sys.stderr if args.json == "-" else sys.stdout)
        self._plan: Plan | None = None

    async def run(self) -> int:
        """Measure until the plan is done, the user interrupts, or the engine fails; then print the figures and stop."""
        loop, measuring = asyncio.get_running_loop(), asyncio.ensure_future(self._measure())
        loop.add_signal_handler(signal.SIGINT, measuring.cancel)
        status, error = 0, None
        try:
            await measuring
        except asyncio.CancelledError:
            status, error = INTERRUPTED, "interrupted"
        except OSError as failure:
            status, error = 1, f"{UNPRINTABLE}: {failure.strerror or failure}"
        except REASONS as failure:
            status, error = 1, str(failure)
        loop.remove_signal_handler(signal.SIGINT)
        if error is not None:
            complain(error)
        written = self._report(interrupted=error is not None)
        await self.engine.stop(STOP_SECONDS if self.engine.info is not None else LOADING_STOP_SECONDS)
        return status if written else status or 1

    async def _measure(self) -> None:
        """Raises what the engine raises, NoRoomError, UnsupportedModelError, or OSError if the output cannot be
        printed."""
        self.engine.start()
        await self.engine.wait_loaded()
        info = self.engine.require_ready()
        if not isinstance(info, EngineInfo):
            raise UnsupportedModelError(f"{info.model} generates no text, so there is nothing to measure")
        self._plan = make_plan(self._args, info)
        pool = f"{megabytes(info.kv_cache_bytes)}, room for {info.max_tokens_in_pool} tokens"
        model = f"{info.num_layers} layers, {megabytes(info.weight_bytes)} of weights, {info.backend} attention"
        rows = ("model", f"{info.model}: {model}"), ("KV cache", pool), ("load", self._plan.description)
        header = "".join(f"{name:9} {value}\n" for name, value in (*machine(), *rows))
        print(header, file=self._console.file, flush=True)
        with progress_display(Console(stderr=True), self._plan.tokens) as begin:
            await self._plan.run(self.engine, info.vocab_size, begin)

    def _report(self, interrupted: bool) -> bool:
        """Returns False if the figures could not be written."""
        if self._plan is None or not isinstance(self.engine.info, EngineInfo):
            return True
        output, target = UNPRINTABLE, self._args.json
        try:
            if (figures := table(self._console, self._plan)) is None:
                complain("nothing was measured")
            else:
                with self._console.capture() as rendered:  # the console itself would ignore a broken pipe
                    self._console.print(figures)
                until = "results until then:\n" if interrupted else ""
                print(until + rendered.get(), end="", file=self._console.file, flush=True)
            if target is not None:
                output = f"--json {target}"
                report = json_report(self.engine.config, self.engine.info, self._plan, interrupted) + "\n"
                if target == "-":
                    print(report, end="", flush=True)
                else:
                    Path(target).write_text(report)
        except OSError as error:
            complain(f"{output}: {error.strerror or error}")
            return False
        return True


def complain(message: str) -> None:
    print(f"mlxpaged: {message}", file=sys.stderr, flush=True)
