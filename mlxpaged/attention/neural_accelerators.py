"""The neural accelerators of an M5's GPU: whether this Mac has them, whether MLX uses them, and what to do if not."""

from __future__ import annotations

import functools
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, distribution

import mlx.core as mx

from mlxpaged import macos

logger = logging.getLogger(__name__)

FIRST_RELEASE = (26, 2)
"""The macOS from which on MLX's build for macOS 26 computes rightly on them. It is installed on 26.0 and 26.1 too, and
uses them there, with wrong results (ml-explore/mlx#4525)."""

TF32_UNIT = 2.0**-11
"""The relative distance of neighbouring TF32 numbers, at least: they have the significand of float16."""

BUILT_FOR = re.compile(r"macosx_(\d+)_\d+_arm64")


def has_units() -> bool:
    """Whether the GPU has them, whatever the system (is_nax_available in MLX's backend/metal/device.cpp)."""
    if not mx.metal.is_available():
        return False
    found = re.search(r"(\d\d)([a-z])$", str(mx.device_info().get("architecture", "")))  # such as applegpu_g17s
    return found is not None and int(found[1]) >= (18 if found[2] == "p" else 17)


def has_neural_accelerators() -> bool:
    """Whether the GPU and the system have what MLX calls NAX."""
    return has_units() and macos.release() >= FIRST_RELEASE


def uses_neural_accelerators() -> bool:
    """Whether MLX computes products on them, by a product: factors of float32 are rounded to TF32 there, so 1 + 2^-13
    becomes 1. That is not seen if MLX_ENABLE_TF32 is 0: then the GPU and the system decide."""
    if not has_units():
        return False
    return has_neural_accelerators() if forbids_tf32() else rounds_products()


def rounds_products() -> bool:
    size = 128
    product = mx.full((size, size), 1 + TF32_UNIT / 4) @ mx.eye(size)
    return bool((product == 1).all())


def forbids_tf32() -> bool:
    return os.environ.get("MLX_ENABLE_TF32", "1").strip() == "0"


def advice() -> str | None:
    """What is wrong with the accelerators of this Mac and what to do; None if nothing is, or if there are none."""
    if not has_units():
        return None
    return advice_for(macos.release(), uses_neural_accelerators(), built_for())


def advice_for(release: tuple[int, int], used: bool, built: int | None) -> str | None:
    """release: of macOS. used: whether MLX uses them. built: the macOS that MLX's library is built for; None if it is
    none of PyPI's wheels."""
    if release == (0, 0):  # not known
        return None
    if release < FIRST_RELEASE:
        if used:
            return (
                f"update macOS: MLX uses the neural accelerators of this M5, which may give wrong results with macOS "
                f"{release[0]}.{release[1]} (ml-explore/mlx#4525); {FIRST_RELEASE[0]}.{FIRST_RELEASE[1]} or later is "
                f"needed"
            )
        return "update macOS: with 26.2 or later, MLX uses the neural accelerators of this M5 for prompts"
    if used:
        return None
    slow = "MLX does not use the neural accelerators of this M5, so prompts take 2 to 4 times as long"
    if built is None:
        return f"{slow}: it is built without them, as Homebrew's is. Install the server with pip or uv instead"
    if built < FIRST_RELEASE[0]:
        again = "SYSTEM_VERSION_COMPAT=0 python -m pip install --force-reinstall --no-deps mlx-metal"
        return f"{slow}: pip took MLX's build for macOS {built}. Install it again with {again}, or with a newer Python"
    return f"{slow}, although it is built for macOS {built}"


@functools.cache
def log_advice() -> None:
    """Warn once, on the thread that uses MLX."""
    if (said := advice()) is not None:
        logger.warning("%s", said)


def built_for() -> int | None:
    """The major number of the macOS that the wheel of mlx-metal is built for; None if there is no such wheel."""
    try:
        found = BUILT_FOR.search(distribution("mlx-metal").read_text("WHEEL") or "")
    except PackageNotFoundError:
        return None
    return int(found[1]) if found else None
