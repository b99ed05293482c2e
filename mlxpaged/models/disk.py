"""Whether the weights of a repository fit on the disk. Nothing here imports mlx before it is called."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from mlxpaged.models.errors import UnsupportedModelError


class DiskFullError(UnsupportedModelError):
    """The disk has no room for the weights that are missing."""


def check_disk(directory: Path, sizes: Mapping[str, int | None]) -> None:
    """directory: of the files that are there. sizes: of all files of the repository. Raises DiskFullError."""
    from mlxpaged.models.sources.preflight import weight_files

    missing = sum(size or 0 for file, size in weight_files(sizes).items() if not (directory / file).exists())
    if missing > (free := free_disk(directory)):
        raise DiskFullError(f"{missing / 1e9:.1f} GB are to be downloaded, but the disk has {free / 1e9:.1f} GB")


def free_disk(directory: Path) -> int:
    """Free bytes of the disk that a directory is on, or will be: a repository without small files has none yet."""
    return shutil.disk_usage(next(each for each in (directory, *directory.parents) if each.exists())).free
