"""The models that are in the local cache of the hub. Nothing here imports mlx."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.json_files import read_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Download:
    """A repository, or a model of another app. path: the files of its newest revision, or a GGUF file. bytes: of all
    its revisions on the disk."""

    name: str
    path: Path
    bytes: int


def missing_files(directory: Path) -> list[str]:
    """Files of weights that the index names and that are not here: the download was interrupted. An index that does not
    name the file with all weights was left by others; transformers takes that file before an index, too."""
    try:
        wanted = read_object(directory / INDEX, missing_is_empty=True).get("weight_map")
    except UnsupportedModelError:
        return [INDEX]
    names = set(map(str, wanted.values())) if isinstance(wanted, dict) else set()
    if WHOLE not in names and (directory / WHOLE).exists():
        return []
    return sorted(name for name in names if not os.path.exists(directory / name))  # it takes any name


def downloads() -> list[Download]:
    """The downloads in the order of their names. Data sets and broken entries of the cache are left out."""
    found = [
        Download(
            repo.repo_id, max(repo.revisions, key=lambda each: each.last_modified).snapshot_path, repo.size_on_disk
        )
        for repo in repositories()
        if repo.revisions
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


def quantization(config: dict[str, object]) -> str:
    """The quantization in a config.json, as "4-bit", "mxfp4" or "bfloat16"; the type of most of a GGUF file's
    weights."""
    if "gguf_type" in config:
        return str(config["gguf_type"])
    part = config.get("quantization") or config.get("quantization_config")
    if isinstance(part, dict):
        mode, bits = part.get("mode", "affine"), part.get("bits")
        return str(mode) if mode != "affine" else f"{bits}-bit" if bits else str(part.get("quant_method", "?"))
    text = config.get("text_config")
    kind = config.get("dtype") or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    return str(kind or "?")
