"""`mlxpaged doctor [MODEL]`: describes this machine, and checks the attention kernels that a model needs."""

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
from mlxpaged.cli.engine_flags import DEFAULTS, add_block_size, add_retune
from mlxpaged.cli.flags import Flags, positive_int
from mlxpaged.cpu import blas
from mlxpaged.models import ModelNotFoundError, UnsupportedModelError, load_model


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Run every attention kernel that a model needs, compare the results with MLX's own operations, "
        "and show which kernel is fastest on this machine for each shape of batch.",
    )
    flags = Flags(parser, defaults=DEFAULTS)
    flags.model(DEFAULTS.model, "model directory or hub repository, whose layers decide which kernels are needed")
    add_block_size(flags)
    flags.field("--max-num-seqs", positive_int, "most sequences in a measured batch")
    add_retune(flags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a kernel fails or the model cannot be served, else 0."""
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)
    print("\n".join(f"{name:9} {value}" for name, value in machine()))
    try:
        served = load_model(args.model)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    print(f"{'model':9} {served.name}: {len(served.layers)} layers\n")
    if not kernels.can_run():
        print("Metal kernels: not used, because there is no Metal device; attention runs on MLX's own operations")
        print("attention tuning: nothing is measured without a Metal device")
        return 0
    shapes = [spec.attention_shape(args.block_size) for spec in served.kv_layers]
    checks = self_check(shapes)
    print("\n".join(table(checks)))
    if any(check.problem for check in checks):
        print("\nattention tuning: nothing is measured, because the Metal kernels are not used")
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
    """Returns a line per shape, followed by a line per case."""
    lines: list[str] = []
    for shape in dict.fromkeys(check.shape for check in checks):
        lines.append(str(shape))
        lines += [f"  {check.case:48} {check.problem or 'ok'}" for check in checks if check.shape == shape]
    return lines


def tuning_table(found: list[ShapeTimes]) -> list[str]:
    """Returns a line per shape, followed by a line per class: its choice, and each candidate's time in milliseconds."""
    lines = [f"attention tuning: {summary(found)}"]
    for one in found:
        source = "cached" if one.cached else "measured now" if one.times else "default"
        lines.append(f"{one.shape}: {source}")
        for entry in one.classes:
            times = one.times.get(entry, {})
            numbers = ", ".join(f"{choice} {1000 * seconds:.3f}" for choice, seconds in times.items())
            lines.append(f"  {entry!s:40} {one.choice(entry)!s:11} {f'{numbers} ms' if numbers else 'not measured'}")
    return lines
