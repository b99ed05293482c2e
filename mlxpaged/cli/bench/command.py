"""Flags, start and end of `mlxpaged bench`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvloop
from rich.console import Console

from mlxpaged.cli.bench.plan import (
    FIRST_CONTEXT,
    Comparison,
    NoRoomError,
    Sweep,
    contexts_up_to,
    room_for_prompt,
)
from mlxpaged.cli.bench.progress import progress_display
from mlxpaged.cli.bench.report import Report, report_console
from mlxpaged.cli.doctor import machine
from mlxpaged.cli.engine_flags import add_engine_flags, add_log_level, engine_config
from mlxpaged.cli.exit import exit_status
from mlxpaged.cli.flags import Flags, output_file, positive_int, positive_ints
from mlxpaged.cli.http_server import megabytes
from mlxpaged.cli.logs import set_up
from mlxpaged.engine import (
    AsyncEngine,
    EngineBusyError,
    EngineConfig,
    EngineInfo,
    EngineUnavailableError,
    RequestFailedError,
)

CONCURRENCY = 8
PROMPTS = 15
PROMPT_TOKENS = (32, 128, 512)
INTERRUPTED = 130
"""Exit status: 128 and the number of SIGINT, as in a shell."""
LOADING_STOP_SECONDS = 1.0
STOP_SECONDS = 10.0

Plan = Callable[[EngineInfo], Comparison | Sweep]
"""Fits the measurement to the model's context and the KV pool. Raises NoRoomError."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s [MODEL] [flags]",
        help="measure how fast this machine serves a model",
        description="Answer the same prompts one at a time and several at a time, and compare; or, with "
        "--context-sweep, measure prefill and decoding at growing contexts. Runs in this process, with the engine that "
        "serves, without HTTP. Each flag can also be set as the environment variable in brackets.",
    )
    flags = Flags(parser)
    flags.model("model directory or hub repository; 'demo' is the bundled model")
    load = flags.group("measurement")
    several = "requests at a time, for example 2,4,8,16; one at a time is always measured, too"
    load.value("--concurrency", positive_ints, None, several, f"{CONCURRENCY}, at most --prompts")
    load.value("--prompts", positive_int, None, "number of prompts", f"{PROMPTS}, at least --concurrency")
    lengths = "lengths of the prompts, in turn; clipped to the context"
    load.value("--prompt-tokens", positive_ints, None, lengths, ",".join(map(str, PROMPT_TOKENS)))
    load.value("--max-tokens", positive_int, 128, "tokens of every answer")
    load.value("--runs", positive_int, 3, "number of repetitions")
    load.switch("--context-sweep", f"measure contexts of {FIRST_CONTEXT}, {2 * FIRST_CONTEXT} and so on instead")
    longest = "longest prompt of --context-sweep"
    load.value("--max-context", positive_int, None, longest, "what fits the model's context and the KV cache")
    load.value("--json", output_file, None, "file for the figures as JSON; - for standard output")
    add_engine_flags(flags)
    add_log_level(flags, "warning")
    parser.set_defaults(run=run, parser=parser)


def planned(args: argparse.Namespace, max_num_seqs: int) -> Plan:
    """Raises ValueError if flags contradict each other, or one has no effect."""
    for name in ("concurrency", "prompts", "prompt_tokens") if args.context_sweep else ("max_context",):
        if getattr(args, name) is not None:
            needs = "has no place beside" if args.context_sweep else "needs"
            raise ValueError(f"--{name.replace('_', '-')} {needs} --context-sweep")
    return planned_sweep(args) if args.context_sweep else planned_comparison(args, max_num_seqs)


def planned_comparison(args: argparse.Namespace, max_num_seqs: int) -> Plan:
    concurrency = args.concurrency or (min(CONCURRENCY, args.prompts or PROMPTS, max_num_seqs),)
    prompts = args.prompts or max(PROMPTS, *concurrency)
    most = max(concurrency)
    if most > max_num_seqs:
        raise ValueError(f"--concurrency {most} is more than run at once: --max-num-seqs is {max_num_seqs}")
    if most > prompts:
        raise ValueError(f"--concurrency {most} is more than there are prompts: --prompts is {prompts}")
    levels = (1, *(number for number in concurrency if number > 1))
    wanted = args.prompt_tokens or PROMPT_TOKENS

    def plan(info: EngineInfo) -> Comparison:
        room = room_for_prompt(info, args.max_tokens, min(wanted))
        lengths = tuple(min(length, room) for length in wanted)
        return Comparison(lengths, lengths != wanted, prompts, args.max_tokens, args.runs, levels)

    return plan


def planned_sweep(args: argparse.Namespace) -> Plan:
    def plan(info: EngineInfo) -> Sweep:
        room = room_for_prompt(info, args.max_tokens, args.max_context or FIRST_CONTEXT)
        return Sweep(contexts_up_to(args.max_context or room), args.max_tokens, args.runs)

    return plan


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if the model cannot be measured, 2 for bad flags, 130 after SIGINT."""
    set_up(args.log_level)
    try:
        config = engine_config(args)
        bench = Bench(config, planned(args, config.max_num_seqs), args.json)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        status = uvloop.run(bench.run())
    except KeyboardInterrupt:  # a second one, after the figures
        status = INTERRUPTED
    return exit_status(bench.engine, status)


class Bench:
    """One run of the command."""

    def __init__(self, config: EngineConfig, plan: Plan, json: str | None) -> None:
        """json: a file, or - for standard output, which then has nothing else."""
        self.engine = AsyncEngine(config)
        self._plan = plan
        self._json = json
        self._console = report_console(sys.stderr if json == "-" else sys.stdout)
        self._measured: Comparison | Sweep | None = None

    async def run(self) -> int:
        """Measure until the plan is done, the user interrupts, or the engine fails; then print the figures and stop."""
        loop, measuring = asyncio.get_running_loop(), asyncio.ensure_future(self._measure())
        loop.add_signal_handler(signal.SIGINT, measuring.cancel)
        await asyncio.wait([measuring])
        loop.remove_signal_handler(signal.SIGINT)
        status, error = 0, None
        if measuring.cancelled():
            status, error = INTERRUPTED, "interrupted"
        elif (failure := measuring.exception()) is not None:
            expected = EngineUnavailableError | EngineBusyError | RequestFailedError | NoRoomError | OSError
            if not isinstance(failure, expected):
                raise failure
            status, error = 1, unwritable(failure) if isinstance(failure, OSError) else str(failure)
        if error is not None:
            complain(error)
        written = self._report(interrupted=error is not None)
        await self.engine.stop(STOP_SECONDS if self.engine.info is not None else LOADING_STOP_SECONDS)
        return status if written else status or 1

    async def _measure(self) -> None:
        """Raises what the engine raises, NoRoomError, or OSError if the output cannot be printed."""
        self.engine.start()
        await self.engine.wait_loaded()
        info = self.engine.require_ready()
        self._measured = self._plan(info)
        print(header(info, self._measured), file=self._console.file, flush=True)
        with progress_display(Console(stderr=True), self._measured.tokens) as begin:
            await self._measured.run(self.engine, info, begin)

    def _report(self, interrupted: bool) -> bool:
        """Returns False if the figures could not be written."""
        if self._measured is None or self.engine.info is None:
            return True
        report = Report(self.engine.config, self.engine.info, self._measured, interrupted)
        table = report.table(self._console)
        if table is None:
            complain("nothing was measured")
        else:
            with self._console.capture() as rendered:  # the console itself would ignore a broken pipe
                self._console.print(table)
            until = "what was measured until then:\n" if interrupted else ""
            try:
                print(until + rendered.get(), end="", file=self._console.file, flush=True)
            except OSError as error:
                complain(unwritable(error))
                return False
        if self._json is None:
            return True
        try:
            report.write_json(self._json, sys.stdout)
        except OSError as error:
            complain(f"--json {self._json}: {error.strerror or error}")
            return False
        return True


def complain(message: str) -> None:
    print(f"mlxpaged: {message}", file=sys.stderr, flush=True)


def unwritable(error: OSError) -> str:
    return f"the figures cannot be printed: {error.strerror or error}"


def header(info: EngineInfo, measured: Comparison | Sweep) -> str:
    model = f"{info.model}: {info.num_layers} layers, {megabytes(info.weight_bytes)} of weights"
    rows = [
        *machine(),
        ("model", f"{model}, {info.backend} attention"),
        ("KV cache", f"{megabytes(info.kv_cache_bytes)}, room for {info.max_tokens_in_pool} tokens"),
        ("load", f"{measured.describe()}, after a warm-up"),
    ]
    return "\n".join(f"{name:9} {value}" for name, value in rows) + "\n"
