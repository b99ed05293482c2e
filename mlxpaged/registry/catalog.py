"""Finds models on this machine that no flag names: repositories of the hub, directories, and models of sources."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.file_facts import FileFacts, file_facts
from mlxpaged.models.files.json_files import CONFIG
from mlxpaged.models.files.kinds import Kind, kind_of
from mlxpaged.models.sources.completeness import has_safetensors, missing_files
from mlxpaged.models.sources.downloads import repositories, whole_snapshot
from mlxpaged.models.sources.gguf.choice import begins_model, choose, gguf_sizes, split_name
from mlxpaged.models.sources.gguf.file import split_paths
from mlxpaged.models.sources.preflight import GGUF, local_file_sizes, weight_files
from mlxpaged.models.sources.resolve import MODELS
from mlxpaged.models.sources.short_names import BUNDLED, full_name
from mlxpaged.models.sources.source import SOURCES, is_inside, source_models, source_path

MAX_SEARCHED = 5_000
"""Directories that are searched for models below one of the user's."""


@dataclass(frozen=True)
class Found:
    """A model on this machine. path: its directory, or its GGUF file. size_bytes: of its weights."""

    name: str
    path: Path
    size_bytes: int

    @property
    def kind(self) -> Kind:
        return kind_of(self.name, self.path)

    def facts(self, chat_template: Path | None = None, tool_parser: str | None = None) -> FileFacts:
        """What its files say. chat_template, tool_parser: as `file_facts` has them."""
        return file_facts(self.name, self.path, chat_template, tool_parser)


class Catalog:
    """Its methods read the disk. directories: their subdirectories are models, named by their paths in them."""

    def __init__(self, directories: tuple[Path, ...] = ()) -> None:
        self._directories = directories

    def find(self, name: str) -> Found | None:
        """A name is that of a repository (OWNER/NAME, or OWNER/NAME:Q4_K_M of GGUF files), its short name, that of a
        directory or a GGUF file, or that of a model of a source, such as Ollama. What is found has the name that `all`
        has: with the tag `latest` if it is Ollama's, and without it otherwise, though clients of Ollama add it."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            return None
        for directory in self._directories:  # "a/./b" and "a/b/" are the model "a/b"
            if (found := described(str(path), directory / path)) is not None:
                return found
        if is_inside(name.partition(":")[2]) and (found := of_source(name)) is not None:
            return found
        name = full_name(name)
        repository, wanted = split_name(name)
        snapshot = whole_snapshot(repository, partial(missing_files, wanted=wanted))
        return None if snapshot is None else described(name if wanted else repository, snapshot, wanted)

    def find_directory(self, name: str) -> Found | None:
        """A directory anywhere on the machine, by its absolute path."""
        try:
            path = Path(name).expanduser()
        except (RuntimeError, ValueError):  # there is no such user, or the name has a null byte
            return None
        return described(str(path), path)

    def find_source(self, source: str) -> Found | None:
        """What a flag names: a bundled model, a directory or a GGUF file, or a repository if it is downloaded."""
        if source in BUNDLED:
            return described(source, MODELS / BUNDLED[source])
        plain, wanted = split_name(source)
        try:
            path, directory = Path(source).expanduser(), Path(plain).expanduser()
            if path.exists():
                return described(source, path)
            if directory.is_dir():
                return described(source, directory, wanted)
            return of_source(source) or self.find(source)
        except (OSError, RuntimeError):  # the name is too long, or there is no such user: the load says so
            return None

    def all(self) -> list[Found]:
        """All models that `find` finds, by name."""
        found = [
            each
            for directory in self._directories
            for path in sorted(model_paths(directory))
            if (each := described(str(path.relative_to(directory)), path)) is not None
        ]
        names = sorted(repository.repo_id for repository in repositories())
        names += [model.name for model in source_models()]
        found += [each for name in names if (each := self.find(name)) is not None]
        return list({each.name: each for each in found}.values())


def model_paths(directory: Path) -> set[Path]:
    """Directories with a config.json, and GGUF files, the first ones of models in parts. Links to directories are
    followed, but a directory is searched once, without links if it can be: a link can lead back. It can also lead to a
    whole disk, so MAX_SEARCHED directories are searched, those near the top first."""
    found, searched = set[Path](), set[Path]()
    left, links = deque([directory]), deque[Path]()
    while (left or links) and len(searched) < MAX_SEARCHED:
        if not left:
            left, links = links, left
        path = left.popleft()
        try:
            real, entries = path.resolve(), sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:  # another user's, for example
            continue
        if real in searched:
            continue
        searched.add(real)
        for entry in entries:
            if is_directory(entry):
                (links if entry.is_symlink() else left).append(path / entry.name)
            elif begins_model(entry.name):
                found.add(path / entry.name)
            elif entry.name == CONFIG:
                found.add(path)
    return found - {directory}


def is_directory(entry: os.DirEntry[str]) -> bool:
    """False for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def described(name: str, path: Path, wanted: str = "") -> Found | None:
    """None if the model in the directory is not whole, or cannot be read. wanted: as `choose` has it."""
    try:
        if path.is_file():
            return Found(name, path, gguf_bytes(path)) if path.suffix.lower() == GGUF else None
        if not path.is_dir() or missing_files(path, wanted):
            return None
        if has_safetensors(path) and not wanted:
            sizes = weight_files(local_file_sizes(path))
            return Found(name, path, sum(size or 0 for size in sizes.values()))
        file = path / choose(gguf_sizes(path), wanted, free_device_memory())[0]
        return Found(name, file, gguf_bytes(file))
    except (OSError, UnsupportedModelError):  # for example if the name is too long, or it is another user's
        return None


def of_source(name: str) -> Found | None:
    """A model of Ollama, for example. A file can have any name there."""
    prefix, _, own = name.partition(":")
    try:
        path = source_path(name)
    except (ModelNotFoundError, OSError):
        return None
    if path is None:
        return None
    listed = f"{prefix}:{SOURCES[prefix].listed(own)}"
    if path.is_file() and not path.suffix:
        return Found(listed, path, path.stat().st_size)
    plain, wanted = (str(path), "") if path.exists() else split_name(str(path))
    return described(listed, Path(plain), wanted)


def gguf_bytes(path: Path) -> int:
    """Bytes of a GGUF file, or of all parts of its model."""
    return sum(part.stat().st_size for part in split_paths(path))
