"""Describes this machine and the software on it. Nothing in it names a user."""

from __future__ import annotations

import platform
from importlib.metadata import version

import mlx.core as mx

from mlxpaged import __version__
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
        ("system", found.system),
        ("packages", f"{packages}, Python {platform.python_version()}"),
        ("kernels", found.kernels),
        ("BLAS", blas.describe()),
    ]
