"""Gives a GGUF file a directory like that of an MLX model: small files made of its metadata, and links to its parts.

The directory is in the user's cache. Weights are never copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.architectures import GGUF_BYTES
from mlxpaged.models.sources.gguf.blocks import memory_bytes
from mlxpaged.models.sources.gguf.config import config_of
from mlxpaged.models.sources.gguf.file import GgufFile, read_gguf, split_paths
from mlxpaged.models.sources.gguf.names import NAMES, weight_name
from mlxpaged.models.sources.gguf.tokenizer import tokenizer_files
from mlxpaged.models.sources.gguf.weights import dtype_name

CONFIG = "config.json"
FORMAT = 4
"""Version of the files that are made. A change makes them again."""


def cache_directory() -> Path:
    """Raises RuntimeError if the user has no home directory."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxpaged" / "gguf"
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "mlxpaged" / "gguf"


def gguf_directory(path: Path) -> Path:
    """The directory of a GGUF file, or of the model that it is a part of; made if it is not there or the file has
    changed. Raises UnsupportedModelError if the file is damaged or not supported."""
    parts = [part.absolute() for part in split_paths(path)]
    try:
        found = [part.stat() for part in parts]
    except FileNotFoundError as error:
        raise UnsupportedModelError(f"{Path(error.filename).name} is missing") from None
    stamp = repr((FORMAT, [(part.st_size, part.st_mtime_ns) for part in found]))
    place, version = digest(str(parts[0])), digest(stamp)
    directory = cache_directory() / f"{place}-{version}"
    if (directory / CONFIG).is_file():
        return directory
    files = directory_files(read_gguf(path))
    try:
        make_directory(directory, files, parts)
    except OSError as error:
        raise UnsupportedModelError(
            f"the files made of its metadata cannot be written to {directory.parent}: {error.strerror or error}"
        ) from error
    return directory


def make_directory(directory: Path, files: Mapping[str, Any], parts: Sequence[Path]) -> None:
    """Write the files and the links to the parts. Directories of the same file before it changed, and of files that are
    deleted, are removed. Raises OSError."""
    place = directory.name.partition("-")[0]
    directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in directory.parent.iterdir():
        if old.name.startswith(f"{place}-") or not all(link.exists() for link in old.glob("model*.gguf")):
            shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8", errors="replace")
        for name, part in zip(link_names(len(parts)), parts, strict=True):
            (made / name).symlink_to(part)
        made.rename(directory)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not (directory / CONFIG).is_file():  # another process has made it
            raise


def digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


def link_names(count: int) -> list[str]:
    """The names of the parts' links."""
    if count == 1:
        return ["model.gguf"]
    return [f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def directory_files(file: GgufFile) -> dict[str, Any]:
    """Contents by the names of files: texts, or what JSON is made of. Raises UnsupportedModelError."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    config = config_of(file) | {"dtype": dtype_name(file), "gguf_type": max(sizes, key=lambda kind: sizes[kind])}
    for name in file.tensors:
        weight_name(NAMES[config["model_type"]], name, config["num_hidden_layers"])  # raises if it is not known
    config[GGUF_BYTES] = sum(memory_bytes(tensor) for tensor in file.tensors.values())
    return {CONFIG: config, **tokenizer_files(file.metadata)}
