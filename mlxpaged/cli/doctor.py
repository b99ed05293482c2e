"""`mlxpaged doctor [MODEL]`: what this machine has, and whether the kernels that a model needs work on it."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlxpaged import __version__
from mlxpaged.attention import Limits, kernels
from mlxpaged.attention.self_check import KernelCheck, self_check
from mlxpaged.attention.tuner import ShapeTimes, summary, tune
from mlxpaged.attention.tuning_cache import Machine
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES
from mlxpaged.cli.flags import RETUNE, Flags, block_size, positive_int
from mlxpaged.cpu import blas
from mlxpaged.engine import EngineConfig
from mlxpaged.models import DEMO_MODEL, ModelNotFoundError, UnsupportedModelError, load_model


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the attention kernels on this machine",
        description="Run every attention kernel that a model needs, compare it with MLX's own operations, and show "
        "which of them is fastest on this machine for which batches.",
    )
    flags = Flags(parser)
    flags.value("model", str, DEMO_MODEL, "model whose layers decide (default demo)", nargs="?", metavar="MODEL")
    flags.value(
        "--block-size", block_size, DEFAULT_BLOCK_SIZE, f"one of {SUPPORTED_BLOCK_SIZES} (default {DEFAULT_BLOCK_SIZE})"
    )
    flags.value(
        "--max-num-seqs",
        positive_int,
        EngineConfig.max_num_seqs,
        f"sequences in the running batch that the timings are for (default {EngineConfig.max_num_seqs})",
    )
    flags.switch("--retune", RETUNE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where a kernel fails or the model cannot be served, else 0."""
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)
    print("\n".join(f"{name:9} {value}" for name, value in machine()))
    try:
        served = load_model(args.model)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    print(f"{'model':9} {served.name}: {len(served.layers)} layers\n")
    if not kernels.can_run():
        print("Metal kernels: not used, there is no Metal device; attention runs on MLX's own operations")
        print("attention tuning: nothing is measured without a Metal device")
        return 0
    shapes = [spec.attention_shape(args.block_size) for spec in served.layers]
    checks = self_check(shapes)
    print("\n".join(table(checks)))
    if any(check.problem for check in checks):
        print("\nattention tuning: nothing is measured, the Metal kernels are not used")
        return 1
    found = tune(shapes, Limits(served.context_length, args.max_num_seqs), args.retune)
    print("\n" + "\n".join(tuning_table(found)))
    return 0


def machine() -> list[tuple[str, str]]:
    found = Machine.current()
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return [
        ("mlxpaged", __version__),
        ("device", f"{found.chip} ({mx.default_device()})"),
        ("system", found.system),
        ("packages", f"{packages}, Python {platform.python_version()}"),
        ("kernels", found.kernels),
        ("BLAS", blas.describe()),
    ]


def table(checks: list[KernelCheck]) -> list[str]:
    """One line per case, under a line per shape."""
    lines: list[str] = []
    for shape in dict.fromkeys(check.shape for check in checks):
        lines.append(str(shape))
        lines += [f"  {check.case:48} {check.problem or 'ok'}" for check in checks if check.shape == shape]
    return lines


def tuning_table(found: list[ShapeTimes]) -> list[str]:
    """Under a line per shape, one per class: the choice, and the time of every candidate in milliseconds."""
    lines = [f"attention tuning: {summary(found)}"]
    for one in found:
        source = "cached" if one.cached else "measured now" if one.times else "default"
        lines.append(f"{one.shape}: {source}")
        for entry in one.classes:
            times = one.times.get(entry, {})
            numbers = ", ".join(f"{choice} {1000 * seconds:.3f}" for choice, seconds in times.items())
            lines.append(f"  {entry!s:40} {one.choice(entry)!s:11} {f'{numbers} ms' if numbers else 'not measured'}")
    return lines
