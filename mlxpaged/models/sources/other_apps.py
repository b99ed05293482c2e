"""Finds the models that Ollama and LM Studio have downloaded. They are used where they are. Nothing here imports mlx.

Ollama keeps a manifest for each name and tag, which lists blobs by their digests; that of the weights is a GGUF file
(https://github.com/ollama/ollama/blob/main/docs/faq.md says where). LM Studio has folders OWNER/NAME with GGUF files or
MLX models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.sources.downloads import Download
from mlxpaged.models.sources.gguf.choice import begins_model, split_name
from mlxpaged.models.sources.short_names import LATEST
from mlxpaged.models.sources.source import Source, is_inside

WEIGHTS = "application/vnd.ollama.image.model"
DEFAULT_PLACE = "registry.ollama.ai/library/"
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
MAX_MANIFEST_BYTES = 2**20
MAX_MODELS = 1000
"""Models of an app that are listed."""


def ollama_directory() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()


def lm_studio_directory() -> Path:
    """Older versions have another one."""
    own, old = (Path.home() / place / "models" for place in (".lmstudio", ".cache/lm-studio"))
    return old if os.path.isdir(old) and not os.path.isdir(own) else own


def lm_studio_path(name: str) -> Path:
    """The path of OWNER/NAME or of a file in it, with the quantization if one is named. Raises ModelNotFoundError."""
    path = lm_studio_directory() / name
    try:
        is_there = is_inside(name) and "/" in name and (path.exists() or Path(split_name(str(path))[0]).exists())
    except OSError:  # for example if the name is too long
        is_there = False
    if not is_there:
        raise ModelNotFoundError(f"LM Studio has no model {name}: `mlxpaged ls` lists them")
    return path


def ollama_path(name: str) -> Path:
    """The GGUF file of a name such as qwen3:8b. Raises ModelNotFoundError."""
    before, _, last = name.rpartition("/")  # a registry can have a port
    model, _, tag = last.partition(":")
    model = f"{before}/{model}" if before else model
    place = model if model.count("/") >= 2 else DEFAULT_PLACE.split("/")[0] + "/" + model
    place = place if "/" in model else DEFAULT_PLACE + model
    manifest = ollama_directory() / "manifests" / place / (tag or "latest")
    found = blob_of(manifest) if is_inside(name) else None
    if found is None:
        raise ModelNotFoundError(f"Ollama has no model {name}: `mlxpaged ls` lists them, `ollama pull` downloads them")
    return found


def blob_of(manifest: Path) -> Path | None:
    """The weights of a manifest; None if it has none, or they are not there."""
    try:
        if not manifest.is_file() or manifest.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [DIGEST.fullmatch(each["digest"]) for each in layers if each["mediaType"] == WEIGHTS]
        blobs = [ollama_directory() / "blobs" / f"sha256-{digest[1]}" for digest in digests if digest is not None]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return blobs[0] if blobs and os.path.isfile(blobs[0]) else None


def ollama_models() -> Iterator[Download]:
    root = ollama_directory() / "manifests"
    for manifest in files_in(root, "*/*/*/*"):
        blob = blob_of(manifest)
        if blob is not None:
            place, tag = manifest.parent.relative_to(root).as_posix(), manifest.name
            name = place.removeprefix(DEFAULT_PLACE).removeprefix(DEFAULT_PLACE.split("/")[0] + "/")
            yield Download(f"ollama:{name}:{tag}", blob, blob.stat().st_size)


def lm_studio_models() -> Iterator[Download]:
    root = lm_studio_directory()
    for config in files_in(root, "*/*/config.json"):
        sizes = [path.stat().st_size for path in config.parent.glob("*.safetensors")]
        if sizes:
            yield Download(f"lmstudio:{config.parent.relative_to(root).as_posix()}", config.parent, sum(sizes))
    for path in files_in(root, "*/*/*.gguf"):
        if begins_model(path.name):
            yield Download(f"lmstudio:{path.relative_to(root).as_posix()}", path, path.stat().st_size)


def files_in(root: Path, pattern: str) -> list[Path]:
    """Regular files, at most MAX_MODELS; none if the folder is another user's."""
    try:
        found = (path for path in root.glob(pattern) if path.is_file())
        return sorted(path for path, _ in zip(found, range(MAX_MODELS), strict=False))
    except OSError:
        return []


def with_tag(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + LATEST


OLLAMA = Source(ollama_path, ollama_models, with_tag)
LM_STUDIO = Source(lm_studio_path, lm_studio_models)
