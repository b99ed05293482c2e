"""Flags, start and end of `mlxpaged bench`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import dataclass
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
from mlxpaged.cli.bench.progress import ProgressDisplay
from mlxpaged.cli.bench.report import Report, report_console
from mlxpaged.cli.doctor import machine
from mlxpaged.cli.exit import exit_status
from mlxpaged.cli.flags import Flags, one_of, output_file, positive_int, positive_ints
from mlxpaged.cli.http_server import megabytes
from mlxpaged.cli.logs import set_up
from mlxpaged.cli.serve import LOG_LEVELS, add_engine_flags, engine_config
from mlxpaged.engine import (
    AsyncEngine,
    EngineBusyError,
    EngineConfig,
    EngineInfo,
    EngineUnavailableError,
    RequestFailedError,
)
from mlxpaged.models import DEMO_MODEL

CONCURRENCY = (8,)
PROMPTS = 15
PROMPT_TOKENS = (32, 128, 512)
MAX_TOKENS = 128
RUNS = 3
INTERRUPTED = 130
"""Exit status: 128 and the number of SIGINT, as a shell gives it."""
LOADING_STOP_SECONDS = 1.0
STOP_SECONDS = 10.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast this machine serves a model",
        description="Answer the same prompts one at a time and several at once, and compare; or, with --context-sweep, "
        "measure prefill and decoding at growing contexts. In this process, through the engine that serves, without "
        "HTTP. Every flag has an environment variable, shown with it.",
    )
    flags = Flags(parser)
    flags.value(
        "model", str, DEMO_MODEL, "model directory or hub repository (default demo)", nargs="?", metavar="MODEL"
    )
    flags.value(
        "--concurrency",
        positive_ints,
        None,
        f"requests at once, one number or several to compare (default {numbers(CONCURRENCY)})",
        metavar="N[,N...]",
    )
    flags.value("--prompts", positive_int, None, f"how many there are (default {PROMPTS})", metavar="N")
    flags.value(
        "--prompt-tokens",
        positive_ints,
        None,
        f"lengths that they have in turn, clipped to the context (default {numbers(PROMPT_TOKENS)})",
        metavar="N[,N...]",
    )
    flags.value("--max-tokens", positive_int, MAX_TOKENS, f"tokens of every answer (default {MAX_TOKENS})", metavar="N")
    flags.value("--runs", positive_int, RUNS, f"times that all is measured (default {RUNS})", metavar="N")
    flags.switch("--context-sweep", f"measure contexts of {FIRST_CONTEXT}, {2 * FIRST_CONTEXT} and so on instead")
    flags.value(
        "--max-context",
        positive_int,
        None,
        "longest prompt of --context-sweep (default: what context and KV pool have room for)",
        metavar="N",
    )
    flags.value("--json", output_file, None, "write the figures as JSON; - for standard output", metavar="FILE")
    add_engine_flags(flags)
    flags.value("--log-level", one_of(*LOG_LEVELS), "warning", f"{', '.join(LOG_LEVELS)} (default warning)")
    parser.set_defaults(run=run, parser=parser)


def numbers(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


@dataclass(frozen=True)
class Wanted:
    """What the flags ask for; lengths are not clipped yet. max_context: None for all there is room for."""

    sweep: bool
    concurrency: tuple[int, ...]
    prompts: int
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    runs: int
    max_context: int | None

    def plan(self, info: EngineInfo) -> Comparison | Sweep:
        """Raises NoRoomError."""
        if not self.sweep:
            room = room_for_prompt(info, self.max_tokens, min(self.prompt_tokens))
            lengths = tuple(min(length, room) for length in self.prompt_tokens)
            clipped = lengths != self.prompt_tokens
            return Comparison(lengths, clipped, self.prompts, self.max_tokens, self.runs, self.concurrency)
        least = FIRST_CONTEXT if self.max_context is None else self.max_context
        room = room_for_prompt(info, self.max_tokens, least)
        return Sweep(contexts_up_to(self.max_context or room), self.max_tokens, self.runs)


def wanted(args: argparse.Namespace, config: EngineConfig) -> Wanted:
    """Raises ValueError where flags contradict each other, or one would do nothing."""
    for name in ("concurrency", "prompts", "prompt_tokens") if args.context_sweep else ("max_context",):
        if getattr(args, name) is not None:
            needs = "has no place beside" if args.context_sweep else "needs"
            raise ValueError(f"--{name.replace('_', '-')} {needs} --context-sweep")
    concurrency, prompts = args.concurrency or CONCURRENCY, args.prompts or PROMPTS
    if not args.context_sweep:
        most = max(concurrency)
        if most > config.max_num_seqs:
            raise ValueError(f"--concurrency {most} is more than run at once: --max-num-seqs is {config.max_num_seqs}")
        if most > prompts:
            raise ValueError(f"--concurrency {most} is more than there are prompts: --prompts is {prompts}")
    return Wanted(
        sweep=args.context_sweep,
        concurrency=concurrency,
        prompts=prompts,
        prompt_tokens=args.prompt_tokens or PROMPT_TOKENS,
        max_tokens=args.max_tokens,
        runs=args.runs,
        max_context=args.max_context,
    )


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, 1 where the model cannot be measured, 2 for bad flags, 130 after SIGINT."""
    set_up(args.log_level)
    try:
        config = engine_config(args)
        bench = Bench(config, wanted(args, config), args.json)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        status = uvloop.run(bench.run())
    except KeyboardInterrupt:  # again, after the figures
        status = INTERRUPTED
    return exit_status(bench.engine, status)


class Bench:
    """One run of the command. json: a file, - for standard output, which then has nothing else, or None."""

    def __init__(self, config: EngineConfig, wanted: Wanted, json: str | None) -> None:
        self.engine = AsyncEngine(config)
        self._wanted = wanted
        self._json = json
        self._console = report_console(sys.stderr if json == "-" else sys.stdout)
        self._measured: Comparison | Sweep | None = None

    async def run(self) -> int:
        """Measure until all is done, or somebody interrupts, or the engine fails; say what was found; stop."""
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
            print(f"mlxpaged: {error}", file=sys.stderr, flush=True)
        written = self._report(interrupted=error is not None)
        await self.engine.stop(STOP_SECONDS if self.engine.info is not None else LOADING_STOP_SECONDS)
        return status if written else status or 1

    async def _measure(self) -> None:
        """Raises EngineUnavailableError, EngineBusyError, RequestFailedError or NoRoomError; OSError where nobody reads
        what is printed."""
        self.engine.start()
        await self.engine.wait_loaded()
        info = self.engine.require_ready()
        self._measured = self._wanted.plan(info)
        print(header(info, self._measured), file=self._console.file, flush=True)
        with ProgressDisplay(Console(stderr=True), self._measured.tokens) as display:
            await self._measured.run(self.engine, info, display.begin)

    def _report(self, interrupted: bool) -> bool:
        """False where the figures could not be written."""
        if self._measured is None or self.engine.info is None:
            return True
        report = Report(self.engine.config, self.engine.info, self._measured, interrupted)
        table = report.table(self._console)
        if table is None:
            print("mlxpaged: nothing was measured", file=sys.stderr, flush=True)
        else:
            with self._console.capture() as rendered:  # what it prints itself, it gives up on without a word
                self._console.print(table)
            until = "what was measured until then:\n" if interrupted else ""
            try:
                print(until + rendered.get(), end="", file=self._console.file, flush=True)
            except OSError as error:
                print(f"mlxpaged: {unwritable(error)}", file=sys.stderr, flush=True)
                return False
        if self._json is None:
            return True
        try:
            report.write_json(self._json, sys.stdout)
        except OSError as error:
            print(f"mlxpaged: --json {self._json}: {error.strerror or error}", file=sys.stderr, flush=True)
            return False
        return True


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
