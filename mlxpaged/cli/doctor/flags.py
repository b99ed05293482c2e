"""The flags of `mlxpaged doctor`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from mlxpaged.cli.connection import add_server_flags
from mlxpaged.cli.engine_flags import DEFAULTS, add_block_size, add_retune
from mlxpaged.cli.flags import Flags, fitting, output_file, positive_int
from mlxpaged.cli.parser import heavy_imports

minutes = fitting(float, "a positive number of minutes", lambda value: 0 < value < math.inf)
REPORT_FILE = "mlxpaged-doctor.json"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        usage="%(prog)s [MODEL] [flags]",
        description="Run every attention kernel that a model needs, compare the results with MLX's own operations, "
        "and measure on this machine: which kernel is fastest for each shape of batch, attention beside MLX's, tokens "
        "per second beside mlx-lm's, and the memory of the largest prefill. With --agent: ask the model to call tools, "
        "and print what comes back right. With --soak: try what has made macOS panic. With --session: say what would "
        "be lost of a session of another service.",
        epilog="Exit status: 0 all is right; 1 a kernel, a task or a request has failed, the model cannot be served, "
        "or a session cannot go on.",
    )
    flags = Flags(parser, defaults=DEFAULTS)
    flags.model(DEFAULTS.model, "model directory or hub repository, whose layers decide which kernels are needed")
    add_block_size(flags)
    flags.field("--max-num-seqs", positive_int, "most sequences in a batch for which kernels are timed")
    add_retune(flags)
    # As in `ls` and `ps`, nothing but the command line sets it: the file's `json` is the file of `bench`.
    parser.add_argument("--json", action="store_true", help="print JSON, to paste into an issue, instead of tables")
    written = f"also write the JSON to a file, {REPORT_FILE} if none is named"
    flags.value("--report", output_file, None, written, without_value=REPORT_FILE)
    asked = "instead, give the model tasks with tools, as agents do, over the server that runs or a new one"
    parser.add_argument("--agent", action="store_true", help=asked)
    panics = "instead, run for so many minutes, 10 if none are named, the load under which macOS has panicked"
    flags.value("--soak", minutes, None, panics, without_value="10")
    lost = "instead, say what would be lost of a session of Codex, Claude Code or opencode that goes on here"
    parser.add_argument("--session", metavar="FILE", help=lost)
    add_server_flags(parser, starts=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.agent:
        from mlxpaged.cli.doctor import agent

        return agent.run(args)
    if args.session is not None:
        with heavy_imports():
            from mlxpaged.cli.doctor import session

        return session.run(args)
    if args.soak is not None:
        from mlxpaged.cli.doctor import soak

        return soak.run(args)
    with heavy_imports():
        from mlxpaged.cli.doctor.command import run
    return run(args)
