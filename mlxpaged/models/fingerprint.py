"""A digest of all that a model computes with: two models that differ in one weight have different ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlxpaged.models.sources.preflight import weight_paths

SHA256 = re.compile(r"[0-9a-f]{64}")


SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Files that say how a model, and its vision tower, compute."""


def fingerprint(directory: Path) -> str:
    """Digest of a model's weights and configuration. The weights are read once, at 1 to 2 GB a second, except for those
    in the hub's cache, whose files have their digests as names."""
    found = hashlib.sha256()
    settings = (directory / name for name in SETTINGS)
    for path in [*filter(Path.is_file, settings), *weight_paths(directory)]:
        found.update(f"{path.name}:{file_digest(path)}\n".encode())
    return found.hexdigest()


def file_digest(path: Path) -> str:
    blob = path.resolve()
    if blob.parent.name == "blobs" and SHA256.fullmatch(blob.name):
        return blob.name
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**22):
            found.update(piece)
    return found.hexdigest()


def library_versions(names: Iterable[str]) -> list[tuple[str, str]]:
    """The versions of distributions; empty for one that is not installed as such."""
    found = []
    for name in names:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, ""))
    return found
