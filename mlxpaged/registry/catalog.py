"""Finds models on this machine that no flag names: downloaded repositories of the hub, and directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from mlxpaged.models.downloads import repositories
from mlxpaged.models.preflight import local_file_sizes, weight_files
from mlxpaged.models.short_names import full_name


@dataclass(frozen=True)
class Found:
    """A model on this machine. size_bytes: of its weights."""

    name: str
    path: Path
    size_bytes: int

    @property
    def makes_embeddings(self) -> bool:
        """Whether its directory says so, as sentence-transformers writes it."""
        return (self.path / "modules.json").is_file()


class Catalog:
    """Its methods read the disk. directories: their subdirectories are models, named by their paths in them."""

    def __init__(self, directories: tuple[Path, ...] = ()) -> None:
        self._directories = directories

    def find(self, name: str) -> Found | None:
        """A name is that of a repository (OWNER/NAME), its short name, or that of a directory."""
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            return None
        for directory in self._directories:  # "a/./b" and "a/b/" are the model "a/b"
            if (found := described(str(path), directory / path)) is not None:
                return found
        name = full_name(name)
        try:
            config = (
                try_to_load_from_cache(name, "config.json", constants.HF_HUB_CACHE) if name.count("/") == 1 else None
            )
        except HFValidationError:  # no repository can have this name
            return None
        return described(name, Path(config).parent) if isinstance(config, str) else None

    def find_directory(self, name: str) -> Found | None:
        """A directory anywhere on the machine, by its absolute path."""
        try:
            path = Path(name).expanduser()
        except RuntimeError:  # there is no such user
            return None
        return described(str(path), path)

    def find_source(self, source: str) -> Found | None:
        """What a flag names: a directory, or a repository if it is downloaded."""
        path = Path(source).expanduser()
        return described(source, path) if path.is_dir() else self.find(source)

    def all(self) -> list[Found]:
        """All models that `find` finds, by name."""
        found = [
            each
            for directory in self._directories
            for path in sorted(directory.glob("**/config.json"))
            if (each := described(str(path.parent.relative_to(directory)), path.parent)) is not None
        ]
        names = sorted(repository.repo_id for repository in repositories())
        found += [each for name in names if (each := self.find(name)) is not None]
        return list({each.name: each for each in found}.values())


def described(name: str, path: Path) -> Found | None:
    """None if the directory has no config.json and weights, or cannot be read."""
    try:
        if not (path / "config.json").is_file():
            return None
        sizes = weight_files(local_file_sizes(path))
    except OSError:  # for example if the name is too long, or the directory is another user's
        return None
    return Found(name, path, sum(size or 0 for size in sizes.values())) if sizes else None
