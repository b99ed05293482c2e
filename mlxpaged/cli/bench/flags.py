"""The flags of `mlxpaged bench`."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpaged.cli.bench.defaults import CONCURRENCY, FIRST_CONTEXT, PROMPT_TOKENS, PROMPTS
from mlxpaged.cli.engine_flags import DEFAULTS, add_engine_flags, add_log_level
from mlxpaged.cli.flags import Flags, output_file, positive_int, positive_ints
from mlxpaged.cli.parser import heavy_imports


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        usage="%(prog)s [MODEL] [flags]",
        description="Answer the same prompts one at a time and several at a time, and compare; or, with "
        "--context-sweep, measure prefill and decoding at growing contexts. Runs in this process, with the engine that "
        "serves, without HTTP. Each flag can also be set as the environment variable in brackets.",
    )
    flags = Flags(parser)
    flags.model(DEFAULTS.model, "model directory or hub repository; 'demo' is the bundled model")
    load = flags.group("measurement")
    several = "requests at a time, for example 2,4,8,16; one at a time is always measured, too"
    load.value("--concurrency", positive_ints, None, several, f"{CONCURRENCY}, at most --prompts")
    load.value("--prompts", positive_int, None, "number of prompts", f"{PROMPTS}, at least --concurrency")
    lengths = "lengths of the prompts in tokens, used in turn; limited to the context"
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


def run(args: argparse.Namespace) -> int:
    with heavy_imports():
        from mlxpaged.cli.bench.command import run
    return run(args)
