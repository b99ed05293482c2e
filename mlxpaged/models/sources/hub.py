"""Downloads the files of a model from the hub."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub import errors as hub_errors

from mlxpaged.models.disk import check_disk
from mlxpaged.models.errors import HubError, ModelNotFoundError, in_one_line
from mlxpaged.models.sources.completeness import (
    WEIGHTS,
    gguf_pattern,
    has_safetensors,
    missing_files,
    missing_weights,
)
from mlxpaged.models.sources.downloads import snapshots, whole_snapshot
from mlxpaged.models.sources.gguf.choice import gguf_sizes, models_with, split_name
from mlxpaged.models.sources.local import check_before_loading, chosen, directory_of
from mlxpaged.models.sources.preflight import (
    GGUF,
    NOTHING,
    FileSizes,
    Reserved,
    hub_file_sizes,
    is_gguf,
    weight_files,
)

logger = logging.getLogger(__name__)

Missing = Callable[[Path], list[str]]

SMALL_FILES = [
    *("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "*.tiktoken", "*.txt"),
    "*_Dense/model.safetensors",  # of sentence-transformers, after the pooling
]
"""What is downloaded beside the weights."""


def download(name: str, reserved: Reserved, num_ranks: int = 1) -> Path:
    """The directory of a hub repository in the local cache. If the hub does not list its files, what is whole there is
    taken without another request, which could take as long. Raises ModelNotFoundError or UnsupportedModelError."""
    found = download_small_files(name, reserved, num_ranks)
    if found is None and (path := on_disk(name)) is not None:
        log_as_it_is(name, path)
        return model_directory(name, path)
    return download_weights(name, () if found is None else tuple(weight_files(found[1])))


def download_weights(name: str, files: Sequence[str] = ()) -> Path:
    """The directory of a hub repository with its weights; what is whole in the local cache if the hub fails. files: of
    weights; empty if they are not known. Raises ModelNotFoundError or UnsupportedModelError."""
    quantization = split_name(name)[1]
    patterns = files or [gguf_pattern(quantization) if quantization else WEIGHTS]
    directory = fetched(name, patterns, partial(missing_files, wanted=quantization))
    if is_gguf(dict.fromkeys(files)) and (directory / files[0]).exists():
        return directory_of(name, directory, files)
    return model_directory(name, directory)


def download_draft_head(name: str) -> Path:
    """The directory of a hub repository with a draft head, which needs weights only. Raises ModelNotFoundError."""
    return fetched(name, [WEIGHTS], missing_weights)


def fetched(name: str, weights: Sequence[str], missing: Missing) -> Path:
    """The directory of a repository with small files and weights; what is whole in the local cache if the hub fails.
    Without the hub, the library refuses a snapshot that lacks any file of these patterns, needed or not (1.22 and
    newer), or returns one that lacks files (older ones). weights: names or patterns. missing: says which files a
    directory lacks. Raises ModelNotFoundError."""
    repository, _ = split_name(name)
    try:
        with hub_errors_explained(name):
            remove_partial_files(repository)
            directory = Path(snapshot_download(repository, allow_patterns=[*SMALL_FILES, *weights]))
        if not all((directory / file).exists() for file in weights) and missing(directory):  # the hub lists no patterns
            raise HubError(f"{name} could not be fetched from the hub: files are missing")
        return directory
    except ModelNotFoundError as error:
        if (found := whole_snapshot(repository, missing)) is not None:
            log_as_it_is(name, found)
            return found
        if isinstance(error, HubError):
            error.args = (f"{error}{how_to_resume(name, missing)}",)
        raise


def how_to_resume(name: str, missing: Missing) -> str:
    """The end of a message: what is missing of a repository that is here in part and, if a GGUF file is named, which
    others are there. Empty if nothing is here, or it cannot be read."""
    repository, quantization = split_name(name)
    with contextlib.suppress(OSError):
        for directory in snapshots(repository)[:1]:
            others = ", ".join(gguf_sizes(directory)) if quantization else ""
            lacks = f"{missing(directory)[0]} is missing" + (f" beside {others}" if others else "")
            return f"; on this machine, {lacks}: `mlxpaged pull {name}` resumes the download"
    return ""


def on_disk(name: str) -> Path | None:
    """The directory of a repository that is whole in the local cache, if there is one."""
    repository, quantization = split_name(name)
    return whole_snapshot(repository, partial(missing_files, wanted=quantization))


def log_as_it_is(name: str, directory: Path) -> None:
    logger.info("%s is whole on this machine (revision %s); the hub does not send it", name, directory.name)


def model_directory(name: str, directory: Path) -> Path:
    """The directory to load, of one that is whole and may have GGUF files. Raises UnsupportedModelError."""
    quantization = split_name(name)[1]
    if has_safetensors(directory) and not quantization:
        return directory
    return directory_of(name, directory, chosen(name, gguf_sizes(directory), quantization))


def download_small_files(
    name: str, reserved: Reserved = NOTHING, num_ranks: int = 1, reclaimable_bytes: int = 0
) -> tuple[Path, FileSizes] | None:
    """The directory of a hub repository with all but its weights, and the sizes of all files, of GGUF files only the
    chosen ones; None if the hub does not tell them, or fails then and the model is whole in the local cache. A GGUF
    file that is downloaded already comes before others. reclaimable_bytes: memory that is not free yet, and can be
    until the model is loaded. Raises ModelNotFoundError, or UnsupportedModelError if the model cannot be loaded or the
    disk has no room for its weights."""
    repository, quantization = split_name(name)
    if (sizes := hub_file_sizes(repository)) is None:
        return None
    try:
        with hub_errors_explained(name):
            directory = Path(snapshot_download(repository, allow_patterns=SMALL_FILES))
    except ModelNotFoundError:
        if on_disk(name) is None:
            raise
        return None
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
    except Exception as error:  # its own errors, and those of its HTTP library and of Xet, which depend on versions
        # What the library misses on the disk may not be needed: only why the hub was of no use is said.
        cause = error.__cause__
        reason = (
            cause if isinstance(error, hub_errors.LocalEntryNotFoundError) and isinstance(cause, Exception) else error
        )
        if isinstance(reason, hub_errors.GatedRepoError):
            message = f"{name} is gated: accept its terms on the hub and log in with `hf auth login`"
            raise ModelNotFoundError(message) from None
        if isinstance(reason, hub_errors.RepositoryNotFoundError):
            raise ModelNotFoundError(f"{name} is neither a local directory nor a repository on the hub") from None
        raise HubError(f"{name} could not be fetched from the hub: {in_one_line(reason)}") from error
