"""Finds the files of a model: bundled, in a directory, a GGUF file, or on the hub, from where they are downloaded.

Whatever the source, the result is a directory with the small files of an MLX model and its weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download

from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.errors import HubError, ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.gguf.choice import choose, gguf_sizes, models_with, split_name
from mlxpaged.models.gguf.directory import gguf_directory
from mlxpaged.models.gguf.file import MAGIC
from mlxpaged.models.other_apps import app_path
from mlxpaged.models.preflight import (
    GGUF,
    NOTHING,
    WEIGHTS,
    FileSizes,
    Reserved,
    check_directory,
    hub_file_sizes,
    is_gguf,
    local_file_sizes,
    weight_files,
    weight_paths,
)
from mlxpaged.models.short_names import BUNDLED, full_name, near_names, taken

logger = logging.getLogger(__name__)

SMALL_FILES = [
    *("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt"),
    "*_Dense/model.safetensors",  # of sentence-transformers, after the pooling
]
"""What is downloaded beside the weights."""


def resolve_model(name: str, reserved: Reserved = NOTHING, num_ranks: int = 1) -> Path:
    """The directory of a bundled model, of a local model, or of a hub repository, which is downloaded if it is not
    cached. A repository may have a short name. The weights are neither downloaded nor read if other files show that
    they cannot be loaded. reserved: memory that is needed beside the weights. num_ranks: each loads a share of them.

    Raises ModelNotFoundError, whose message says what was tried, or UnsupportedModelError."""
    if name in BUNDLED:
        path = Path(__file__).parent / BUNDLED[name]
        check_before_loading(name, path, local_file_sizes(path), reserved, num_ranks)
        return path
    if (said := taken(name)) is not None:
        logger.info("%s", said)
    name = full_name(name)
    path = local_path(name) or download(name, reserved, num_ranks)
    check_before_loading(name, path, local_file_sizes(path), reserved, num_ranks)
    return path


def local_path(name: str) -> Path | None:
    """The directory of a model that a path names, or that another app has; None for a hub repository. Raises
    ModelNotFoundError or UnsupportedModelError."""
    path = Path(app_path(name) or name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == MAGIC:
                return directory_of(name, path.parent, [path.name])
        raise ModelNotFoundError(f"{path} is a file; use an MLX model, a directory with config.json and safetensors")
    plain, quantization = split_name(str(path))
    for each, wanted in ((path, ""), (Path(plain), quantization)):
        if each.is_dir():
            if not (found := {} if weight_paths(each) and not wanted else gguf_sizes(each)):
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


def download(name: str, reserved: Reserved, num_ranks: int = 1) -> Path:
    """The directory of a hub repository in the local cache. Raises ModelNotFoundError or UnsupportedModelError."""
    found = download_small_files(name, reserved, num_ranks)
    return download_weights(name, () if found is None else tuple(weight_files(found[1])))


def download_weights(name: str, files: Sequence[str] = ()) -> Path:
    """The directory of a hub repository with its weights. files: of weights; empty if they are not known. Raises
    ModelNotFoundError or UnsupportedModelError."""
    repository, quantization = split_name(name)
    with hub_errors_explained(name):
        directory = Path(snapshot_download(repository, allow_patterns=[*SMALL_FILES, *(files or [WEIGHTS])]))
    if is_gguf(dict.fromkeys(files)):
        return directory_of(name, directory, files)
    # It was downloaded before, and the hub is not there.
    if (quantization or not weight_paths(directory)) and (found := gguf_sizes(directory)):
        return directory_of(name, directory, chosen(name, found, quantization))
    return directory


def download_small_files(
    name: str, reserved: Reserved = NOTHING, num_ranks: int = 1, reclaimable_bytes: int = 0
) -> tuple[Path, FileSizes] | None:
    """The directory of a hub repository with all but its weights, and the sizes of all files, of GGUF files only the
    chosen ones; None if the hub does not tell them. A GGUF file that is downloaded already comes before others.
    reclaimable_bytes: memory that is not free yet, and can be until the model is loaded. Raises ModelNotFoundError, or
    UnsupportedModelError if the model cannot be loaded."""
    repository, quantization = split_name(name)
    with hub_errors_explained(name):
        sizes = hub_file_sizes(repository)
        if sizes is None:
            return None
        directory = Path(snapshot_download(repository, allow_patterns=SMALL_FILES))
        if quantization or is_gguf(sizes):
            there = models_with(sizes, [file for file in sizes if (directory / file).exists()])
            files = chosen(name, there if there and not quantization else sizes, quantization)
            sizes = {file: size for file, size in sizes.items() if file in files or not is_weights(file)}
    check_before_loading(name, directory, sizes, reserved, num_ranks, reclaimable_bytes)
    return directory, sizes


def is_weights(file: str) -> bool:
    """Whether a file has weights, by its name."""
    return file.lower().endswith((GGUF, ".safetensors"))


@contextlib.contextmanager
def hub_errors_explained(name: str) -> Iterator[None]:
    """Turns the errors of the hub's library into ModelNotFoundError or HubError."""
    try:
        yield
    except hub_errors.GatedRepoError:
        message = f"{name} is gated: accept its terms on the hub and log in with `hf auth login`"
        raise ModelNotFoundError(message) from None
    except hub_errors.RepositoryNotFoundError:
        raise ModelNotFoundError(f"{name} is neither a local directory nor a repository on the hub") from None
    except (hub_errors.HFValidationError, hub_errors.HfHubHTTPError, OSError) as error:
        raise HubError(f"{name} could not be fetched from the hub: {error}") from error


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
