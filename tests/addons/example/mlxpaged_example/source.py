"""Models in tar files: tar:NAME is NAME.tar in the directory EXAMPLE_MODELS."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.sources.downloads import Download
from mlxpaged.models.sources.source import Source


def directory() -> Path:
    return Path(os.environ.get("EXAMPLE_MODELS", "~/models")).expanduser()


def find(name: str) -> Path:
    """The directory with the files of NAME.tar, which is unpacked once. Raises ModelNotFoundError."""
    file, unpacked = directory() / f"{name}.tar", directory() / f"{name}.unpacked"
    if not file.is_file():
        raise ModelNotFoundError(f"there is no {name}.tar: `mlxpaged ls` lists the models in tar files")
    if not unpacked.exists():
        shutil.rmtree(part := directory() / f"{name}.part", ignore_errors=True)
        part.mkdir(parents=True)
        with tarfile.open(file) as tar:
            for member in tar:
                if (content := tar.extractfile(member)) is not None:  # a file; no path in it leads anywhere else
                    with open(part / Path(member.name).name, "wb") as target:
                        shutil.copyfileobj(content, target)
        part.rename(unpacked)
    return unpacked


def models() -> Iterator[Download]:
    """Those that were unpacked."""
    for path in sorted(directory().glob("*.unpacked")):
        yield Download(f"tar:{path.stem}", path, sum(file.stat().st_size for file in path.iterdir()))


TAR = Source(find, models)
