"""`mlxpaged doctor [MODEL]`: what this machine has, and whether the kernels that a model needs work on it."""

from __future__ import annotations

import argparse
import logging
import platform
import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlxpaged import __version__, blas
from mlxpaged.attention import kernels
from mlxpaged.attention.self_check import KernelCheck, self_check
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES
from mlxpaged.cli.flags import Flags, block_size
from mlxpaged.models import DEMO_MODEL, ModelNotFoundError, UnsupportedModelError, load_model


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the attention kernels on this machine",
        description="Run every attention kernel that a model needs, compare it with MLX's own operations, and say so.",
    )
    flags = Flags(parser)
    flags.value("model", str, DEMO_MODEL, "model whose layers decide (default demo)", nargs="?", metavar="MODEL")
    flags.value("--block-size", block_size, DEFAULT_BLOCK_SIZE, f"one of {SUPPORTED_BLOCK_SIZES} (default 32)")
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
        return 0
    checks = self_check(spec.attention_shape(args.block_size) for spec in served.layers)
    print("\n".join(table(checks)))
    return int(any(check.problem for check in checks))


def machine() -> list[tuple[str, str]]:
    info = mx.device_info()
    system = f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform()
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    return [
        ("mlxpaged", __version__),
        ("device", f"{info.get('device_name', platform.machine())} ({mx.default_device()})"),
        ("system", system),
        ("packages", f"{packages}, Python {platform.python_version()}"),
        ("BLAS", blas.describe()),
    ]


def table(checks: list[KernelCheck]) -> list[str]:
    """One line per case, under a line per shape."""
    lines: list[str] = []
    for shape in dict.fromkeys(check.shape for check in checks):
        lines.append(str(shape))
        lines += [f"  {check.case:48} {check.problem or 'ok'}" for check in checks if check.shape == shape]
    return lines
