"""Finds the files of a model on this machine: in a directory, a GGUF file, or a source such as another app's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.sources.completeness import has_safetensors
from mlxpaged.models.sources.gguf.choice import choose, gguf_sizes, split_name
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.gguf.file import MAGIC
from mlxpaged.models.sources.preflight import FileSizes, Reserved, check_directory
from mlxpaged.models.sources.short_names import near_names
from mlxpaged.models.sources.source import source_path


def local_path(name: str) -> Path | None:
    """The directory of a model that a path names, or that a source has; None for a hub repository. Raises
    ModelNotFoundError or UnsupportedModelError."""
    try:
        return found_path(name)
    except OSError as error:  # for example if the name is too long, or the file is another user's
        raise ModelNotFoundError(f"{name} cannot be read: {error.strerror or error}") from None


def found_path(name: str) -> Path | None:
    """Does what `local_path` does. Raises OSError too."""
    try:
        path = Path(source_path(name) or name).expanduser()
    except RuntimeError:
        raise ModelNotFoundError(f"there is no such home directory: {name}") from None
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == MAGIC:
                return directory_of(name, path.parent, [path.name])
        raise ModelNotFoundError(f"{path} is a file; use an MLX model, a directory with config.json and safetensors")
    plain, quantization = split_name(str(path))
    for each, wanted in ((path, ""), (Path(plain), quantization)):
        if each.is_dir():
            if not (found := {} if has_safetensors(each) and not wanted else gguf_sizes(each)):
                return each
            return directory_of(name, each, chosen(name, found, wanted))
    if name.startswith((".", "/", "~")) or split_name(name)[0].count("/") != 1:
        near = ", ".join(near_names(name)) if "/" not in name else ""
        meant = f"; did you mean {near}?" if near else "; a hub repository is named OWNER/NAME"
        raise ModelNotFoundError(f"no such directory: {name if '://' in name else path}{meant}")
    return None


def chosen(name: str, sizes: FileSizes, quantization: str) -> list[str]:
    """What `choose` returns. Raises UnsupportedModelError, which names the model."""
    try:
        return choose(sizes, quantization, free_device_memory())
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be loaded: {error}") from None


def directory_of(name: str, parent: Path, files: Sequence[str]) -> Path:
    """The directory that stands for a GGUF file in `parent`. Raises UnsupportedModelError, which names the model."""
    try:
        return gguf_directory(parent / files[0])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be loaded: {error}") from None


def check_before_loading(
    name: str,
    directory: Path,
    sizes: FileSizes,
    reserved: Reserved,
    num_ranks: int = 1,
    reclaimable_bytes: int = 0,
) -> None:
    shares = {file: size and size // num_ranks for file, size in sizes.items()}
    try:
        check_directory(directory, shares, free_device_memory() + reclaimable_bytes, reserved)
    except UnsupportedModelError as error:
        what = f"its share of {name}, one of {num_ranks}," if num_ranks > 1 else name
        error.args = (f"{what} cannot be loaded: {error}",)
        raise
