"""Describes this machine and the software on it. Nothing in it names a user."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import version

import mlx.core as mx

from mlxpaged import __version__, addons, macos
from mlxpaged.attention.neural_accelerators import advice, forbids_tf32, has_units, uses_neural_accelerators
from mlxpaged.attention.tuning_cache import Machine
from mlxpaged.cpu import blas


def machine() -> list[tuple[str, str]]:
    found, device = Machine.current(), mx.device_info()
    packages = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
    sizes = {"memory": device.get("memory_size"), "GPU limit": device.get("max_recommended_working_set_size")}
    return [
        ("mlxpaged", __version__),
        ("device", f"{found.chip} ({mx.default_device()}, {device.get('architecture', platform.machine())})"),
        *((name, f"{int(size) / 2**30:.1f} GiB") for name, size in sizes.items() if size),
        ("neural accelerators", neural_accelerators()),
        ("system", found.system),
        *power(),
        ("packages", f"{packages}, Python {platform.python_version()}"),
        ("kernels", found.kernels),
        ("BLAS", blas.describe()),
        *((f"add-on {addon.name}", addon.contents) for addon in addons.from_outside()),
    ]


THERMAL = ("nominal", "fair", "serious: macOS slows the chip down", "critical: macOS slows the chip down")
POWER_MODES = {"0": "automatic", "1": "low power", "2": "high power"}
PMSET = ["/usr/bin/pmset", "-g"]


def power() -> list[tuple[str, str]]:
    """What makes a Mac slower or faster; empty elsewhere. First reports of macOS 27 have decoding a third slower until
    the power mode is changed."""
    found: list[tuple[str, str]] = []
    if (mode := power_mode(settings(), macos.low_power())) is not None:
        found.append(("power mode", f"{mode}, {'on battery' if macos.on_battery() else 'plugged in'}"))
    if (thermal := macos.thermal_state()) is not None:
        found.append(("thermal state", THERMAL[thermal] if thermal in range(len(THERMAL)) else str(thermal)))
    return found


def settings() -> str:
    """The settings of power management that are in use; "" elsewhere than on a Mac."""
    if sys.platform != "darwin":
        return ""
    try:
        return subprocess.run(PMSET, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def power_mode(settings: str, is_low: bool | None) -> str | None:
    """settings: of `pmset -g`, in which only Macs with a high power mode have `powermode`. is_low: whether macOS says
    that the low power mode is on; None if it does not say."""
    given = re.search(r"^\s*powermode\s+(\d)", settings, re.MULTILINE)
    if given is not None and given[1] in POWER_MODES:
        return POWER_MODES[given[1]]
    given = re.search(r"^\s*lowpowermode\s+([01])", settings, re.MULTILINE)
    if given is not None:
        is_low = given[1] == "1"
    return None if is_low is None else "low power" if is_low else "automatic"


def neural_accelerators() -> str:
    """What runs, and what to do if it should not be so."""
    said = advice()
    more = "" if said is None else f": {said}"
    if uses_neural_accelerators():
        return f"used{more}" if not forbids_tf32() else "not known, because MLX_ENABLE_TF32 is 0"
    return f"not used{more}" if has_units() else "none: an M5 or later has them"
