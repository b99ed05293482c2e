"""The models that are in the local cache of the hub. Nothing here imports mlx."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.completeness import missing_files


@dataclass(frozen=True)
class Download:
    """A repository, or a model of another app. path: the files of the revision that is served, or if none is whole, of
    its main branch; or a GGUF file. bytes: of all its revisions on the disk."""

    name: str
    path: Path
    bytes: int


def snapshots(repository: str) -> list[Path]:
    """The directories of a repository's revisions in the cache: first that of its main branch, then the newest ones. A
    revision may be there in part only."""
    if repository.count("/") != 1:
        return []
    folder = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}")
    try:
        found = {path.name: path.stat().st_mtime for path in (folder / "snapshots").iterdir() if path.is_dir()}
    except (OSError, ValueError):  # there is none, it is another user's, or no repository can have this name
        return []
    try:
        main = (folder / "refs" / constants.DEFAULT_REVISION).read_text().strip()
    except (OSError, ValueError):
        main = ""
    names = sorted(found, key=lambda name: (name == main, found[name], name), reverse=True)
    return [folder / "snapshots" / name for name in names]


def whole_snapshot(repository: str, missing: Callable[[Path], list[str]] = missing_files) -> Path | None:
    """The first of a repository's snapshots that is a whole model: what is served without the hub. missing: says which
    files a directory lacks."""
    for path in snapshots(repository):
        with contextlib.suppress(OSError, UnsupportedModelError):
            if not missing(path):
                return path
    return None


def downloads() -> list[Download]:
    """The downloads in the order of their names. Data sets and broken entries of the cache are left out."""
    found = [
        Download(repo.repo_id, path, repo.size_on_disk)
        for repo in repositories()
        if (path := whole_snapshot(repo.repo_id) or next(iter(snapshots(repo.repo_id)), None)) is not None
    ]
    return sorted(found, key=lambda each: each.name.lower())


def remove(name: str) -> None:
    """Delete all revisions of a repository of the cache."""
    commits = [revision.commit_hash for repo in repositories() if repo.repo_id == name for revision in repo.revisions]
    scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*commits).execute()


def repositories() -> list[CachedRepoInfo]:
    try:
        return [repo for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"]
    except (CacheNotFound, OSError):  # another user's, for example
        return []


UNKNOWN = "?"


def quantization(config: Mapping[str, object]) -> str:
    """The quantization in a config.json, as "4-bit", "mxfp4" or "bfloat16"; the type of most of a GGUF file's
    weights; UNKNOWN if it says nothing."""
    if "gguf_type" in config:
        return str(config["gguf_type"])
    part = config.get("quantization") or config.get("quantization_config")
    if isinstance(part, dict):
        mode, bits = part.get("mode", "affine"), part.get("bits")
        return str(mode) if mode != "affine" else f"{bits}-bit" if bits else str(part.get("quant_method", UNKNOWN))
    text = config.get("text_config")
    kind = config.get("dtype") or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    return str(kind or UNKNOWN)
