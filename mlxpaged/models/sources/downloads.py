"""The models that are in the local cache of the hub. Nothing here imports mlx."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.json_files import CONFIG, read_object
from mlxpaged.models.sources.gguf.choice import PART, choose, gguf_sizes

WEIGHTS = "model*.safetensors"
"""The files that mlx-lm loads. Some repositories hold the same weights under other names too."""

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Download:
    """A repository, or a model of another app. path: as `snapshot_of` has it, or a GGUF file. bytes: of all
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
    names |= {path.name for path in directory.glob(WEIGHTS) if path.is_symlink() and not path.exists()}
    if WHOLE not in names and (directory / WHOLE).exists():
        return []
    return sorted(name for name in names if not os.path.exists(directory / name))  # it takes any name


def missing_part(directory: Path, wanted: str = "") -> str | None:
    """What a directory lacks of a model that can be loaded; None if nothing. wanted: the GGUF file or quantization that
    is loaded, empty for any."""
    try:
        if not wanted and any(directory.glob(WEIGHTS)):
            missing = missing_files(directory)
            return missing[0] if missing else None if (directory / CONFIG).is_file() else CONFIG
        files = choose(gguf_sizes(directory), wanted, 0)
    except (OSError, UnsupportedModelError):
        return f"a GGUF file {wanted}" if wanted else "its weights"
    part = PART.search(files[0])
    return None if part is None or len(files) == int(part[2]) else f"a part of {files[0]}"


def snapshot_of(repository: str, wanted: str = "") -> Path | None:
    """The folder of a downloaded repository; None if it is not downloaded. It is that of the revision that `main` was
    at last if that is whole, else the newest one that is, and the first of these if none is. The hub's library asks for
    all files that its patterns match: it refuses a GGUF file if the repository has safetensors too. wanted: as
    `missing_part` has it."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        found = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        main = (folder / "refs" / "main").read_text().strip()
        found.sort(key=lambda path: path.name != main)
    return next((path for path in found if missing_part(path, wanted) is None), found[0] if found else None)


def downloads() -> list[Download]:
    """The downloads in the order of their names. Data sets and broken entries of the cache are left out."""
    found = [
        Download(repo.repo_id, path, repo.size_on_disk)
        for repo in repositories()
        if (path := snapshot_of(repo.repo_id)) is not None
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
