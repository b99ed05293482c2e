"""Downloads the files of a model from the hub."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub import errors as hub_errors

from mlxpaged.models.disk import check_disk
from mlxpaged.models.errors import HubError, ModelNotFoundError, UnsupportedModelError, in_one_line
from mlxpaged.models.sources.downloads import WEIGHTS, missing_part, snapshot_of
from mlxpaged.models.sources.gguf.choice import gguf_sizes, models_with, split_name
from mlxpaged.models.sources.local import check_before_loading, chosen, directory_of
from mlxpaged.models.sources.preflight import (
    GGUF,
    NOTHING,
    FileSizes,
    Reserved,
    has_safetensors,
    hub_file_sizes,
    is_gguf,
    weight_files,
)

SMALL_FILES = [
    *("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt"),
    "*_Dense/model.safetensors",  # of sentence-transformers, after the pooling
]
"""What is downloaded beside the weights."""


def download(name: str, reserved: Reserved, num_ranks: int = 1) -> Path:
    """The directory of a hub repository in the local cache. Raises ModelNotFoundError or UnsupportedModelError."""
    found = download_small_files(name, reserved, num_ranks)
    return download_weights(name, () if found is None else tuple(weight_files(found[1])))


def download_weights(name: str, files: Sequence[str] = ()) -> Path:
    """The directory of a hub repository with its weights. files: of weights; empty if they are not known. Raises
    ModelNotFoundError or UnsupportedModelError."""
    repository, quantization = split_name(name)
    with hub_errors_explained(name):
        remove_partial_files(repository)
        try:
            directory = Path(snapshot_download(repository, allow_patterns=[*SMALL_FILES, *(files or [WEIGHTS])]))
        except hub_errors.LocalEntryNotFoundError:  # the hub is not there, and the library misses a file
            found_here = snapshot_of(repository, quantization)
            if found_here is None:
                raise
            directory = found_here
        if not files:
            directory = whole_snapshot(name, directory)
    if is_gguf(dict.fromkeys(files)):
        return directory_of(name, directory, files)
    # It was downloaded before, and the hub is not there.
    if (quantization or not has_safetensors(directory)) and (found := gguf_sizes(directory)):
        return directory_of(name, directory, chosen(name, found, quantization))
    return directory


def whole_snapshot(name: str, directory: Path) -> Path:
    """The folder of a repository that is downloaded, if all is there that a load needs. directory: what the library has
    found. Raises UnsupportedModelError, which says how to go on, if something is missing."""
    repository, quantization = split_name(name)
    if missing_part(directory, quantization) is not None:
        directory = snapshot_of(repository, quantization) or directory
    missing = missing_part(directory, quantization)
    if missing is not None and not quantization:
        raise HubError(
            f"{name} is downloaded in part, and the hub cannot be reached: {missing} is missing; "
            f"`mlxpaged pull {name}` resumes the download"
        )
    return directory


def download_small_files(
    name: str, reserved: Reserved = NOTHING, num_ranks: int = 1, reclaimable_bytes: int = 0
) -> tuple[Path, FileSizes] | None:
    """The directory of a hub repository with all but its weights, and the sizes of all files, of GGUF files only the
    chosen ones; None if the hub does not tell them. A GGUF file that is downloaded already comes before others.
    reclaimable_bytes: memory that is not free yet, and can be until the model is loaded. Raises ModelNotFoundError, or
    UnsupportedModelError if the model cannot be loaded or the disk has no room for its weights."""
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
    remove_partial_files(repository)
    check_disk(directory, sizes)
    return directory, sizes


def is_weights(file: str) -> bool:
    """Whether a file has weights, by its name."""
    return file.lower().endswith((GGUF, ".safetensors"))


def remove_partial_files(repository: str) -> None:
    """Delete what interrupted downloads have left: since its version 2, the library begins a file anew, under another
    name. While it downloads one, it holds a lock."""
    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{repository.replace('/', '--')}"
    for path in (cache / folder / "blobs").glob("*.*.incomplete"):
        lock = cache / ".locks" / folder / f"{path.name.partition('.')[0]}.lock"
        # Another process may hold it. It is not made here: without `flock`, the library takes its presence for a lock.
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


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
    except (UnsupportedModelError, HubError):
        raise
    except Exception as error:  # its own errors, and those of its HTTP library and of Xet, which depend on versions
        raise HubError(f"{name} could not be fetched from the hub: {in_one_line(error)}") from error
