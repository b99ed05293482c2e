"""The command line of benchmarks/compare.py. Standard library only."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

from .environments import BEFORE, CACHE, SERVER_PACKAGES

LOADS = ("A", "B", "C", "D", "E")

DESCRIPTION = """\
mlxpaged beside mlx-lm's server, vllm-mlx and Rapid-MLX: the same requests to one after the other, each in its own
environment, started by its own command. Makes what it needs (model, environments; kept in the cache directory) and
writes comparison.json, comparison.md and comparison.png.

A  32 distinct prompts of 140 tokens, 64 out, 1, 4 and 16 at a time
B  32 prompts with one prefix of 2,000 tokens, 32 out, 16 at a time
C  8 streams decode while 5 prompts of 4,000 tokens arrive, one every 5 seconds
D  4 users, 8 turns each
E  Poisson arrivals, mixed lengths, at 0.5, 0.8 and 1.2 of the capacity of the best server

--agent: two sessions of an agent at once instead, with one system text, results of tools, titles beside the first
turns, and a restart of the server; it writes agent.json and agent.md.
"""


@dataclass(frozen=True)
class Options:
    """Times in seconds."""

    loads: tuple[str, ...]
    servers: tuple[str, ...]
    before: Path | None
    model: str | None
    gguf: Path | None
    agent: bool
    ready_seconds: float
    quick: bool
    repeat: int
    capacity: float | None
    request_seconds: float
    load_seconds: float
    budget_seconds: float
    cache: Path
    out: Path
    markdown: Path | None


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="compare.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    servers = tuple(SERVER_PACKAGES)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--servers", nargs="+", choices=servers, default=servers)
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="another checkout of mlxpaged, as a server more"
    )
    parser.add_argument("--model", help="a directory or hub repository, for all servers; default: made from a seed")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="a Llama: one table of it and of a float32 directory of it, on this server, mlx-lm's and llama.cpp's; "
        "with --agent: what llama.cpp's server loads",
    )
    parser.add_argument("--agent", action="store_true", help="sessions of an agent instead of the loads")
    parser.add_argument("--ready-timeout", type=float, default=300, help="seconds for a start with --gguf, default 300")
    parser.add_argument("--quick", action="store_true", help="small loads: shows that all works, measures little")
    parser.add_argument("--repeat", type=int, default=1, help="times that all of it is run; reported are medians")
    parser.add_argument("--capacity", type=float, help="requests a second for E; default: measured first")
    parser.add_argument("--request-timeout", type=float, default=300, help="seconds, default 300")
    parser.add_argument("--load-timeout", type=float, default=300, help="seconds for each load, default 300")
    parser.add_argument("--budget", type=float, default=240, help="minutes; loads that come later are left out")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default {CACHE}")
    parser.add_argument("--out", type=Path, help="directory of the results; default: in the cache, by date")
    parser.add_argument("--markdown", type=Path, metavar="JSON", help="only print saved results as Markdown")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    for name in ("request_timeout", "load_timeout", "ready_timeout", "budget"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0")
    if args.capacity is not None and not 0 < args.capacity < math.inf:
        parser.error("--capacity must be a number above 0")
    if args.before is not None and not (args.before / "pyproject.toml").is_file():
        parser.error(f"--before {args.before}: not a checkout of mlxpaged")
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: no such file")
    cache = args.cache.expanduser().resolve()
    return Options(
        loads=tuple(letter for letter in LOADS if letter in args.loads),
        servers=tuple(server for server in servers if server in args.servers) + (BEFORE,) * bool(args.before),
        before=args.before and args.before.resolve(),
        model=args.model,
        gguf=args.gguf and args.gguf.resolve(),
        agent=args.agent,
        ready_seconds=args.ready_timeout,
        quick=args.quick,
        repeat=args.repeat,
        capacity=args.capacity,
        request_seconds=args.request_timeout,
        load_seconds=args.load_timeout,
        budget_seconds=60 * args.budget,
        cache=cache,
        out=(args.out or cache / "results" / time.strftime("%Y-%m-%d-%H%M%S")).resolve(),
        markdown=args.markdown,
    )
