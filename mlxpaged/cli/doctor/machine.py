"""Describes this machine and the software on it. Nothing in it names a user."""

from __future__ import annotations

import platform
from importlib.metadata import version

import mlx.core as mx

from mlxpaged import __version__, addons
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
        ("packages", f"{packages}, Python {platform.python_version()}"),
        ("kernels", found.kernels),
        ("BLAS", blas.describe()),
        *((f"add-on {addon.name}", addon.contents) for addon in addons.from_outside()),
    ]


def neural_accelerators() -> str:
    """What runs, and what to do if it should not be so."""
    said = advice()
    more = "" if said is None else f": {said}"
    if uses_neural_accelerators():
        return f"used{more}" if not forbids_tf32() else "not known, because MLX_ENABLE_TF32 is 0"
    return f"not used{more}" if has_units() else "none: an M5 or later has them"
