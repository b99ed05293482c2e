"""Says which files of a model are missing in its directory: a download was interrupted, or took only a part of them.

Every command and the API ask here, so that they agree. Nothing here imports mlx.
"""

from __future__ import annotations

import contextlib
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import CONFIG, read, read_object
from mlxpaged.models.sources.gguf.choice import gguf_sizes, missing_parts, models_of

WEIGHTS = "model*.safetensors"
"""The files that mlx-lm loads. Some repositories hold the same weights under other names too."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PART = re.compile(r"(?<=^model)-(\d{5})-of-(\d{5})(\.safetensors)$")

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
]
"""A tokenizer without any of these is only Python code."""

MODULE_FILES = {"Pooling": (CONFIG,), "Dense": (CONFIG, WHOLE)}
"""What a module of sentence-transformers has in its own directory, by the end of its type."""


def has_safetensors(directory: Path) -> bool:
    """Whether a directory of the user has weights in MLX's format, and so its GGUF files are others."""
    return any(directory.glob(WEIGHTS))


def missing_files(directory: Path, wanted: str = "") -> list[str]:
    """Names of missing files, or their pattern; empty if the model is whole. Not all of them are named. wanted: as
    `choose` has it. Raises OSError, and UnsupportedModelError if there are too many files."""
    if wanted or not has_safetensors(directory):
        return missing_gguf(directory, wanted)
    here = [path.name for path in directory.iterdir() if os.path.exists(path)]  # a link may lead to nothing
    has_tokenizer = any(fnmatch(name, pattern) for name in here for pattern in TOKENIZER_FILES)
    return [
        *([] if CONFIG in here else [CONFIG]),
        *missing_weights(directory),
        *([] if has_tokenizer or is_tokenizer_code(directory) else TOKENIZER_FILES[:1]),
        *missing_of_modules(directory),
    ]


def lack_of(directory: Path) -> str:
    """The beginning of a message about a load that failed; empty if the model is whole, or its files cannot be read."""
    with contextlib.suppress(OSError, UnsupportedModelError):
        for name in missing_files(directory)[:1]:
            return f"{name} is missing: "
    return ""


def missing_gguf(directory: Path, wanted: str) -> list[str]:
    try:
        models = models_of(gguf_sizes(directory), wanted)
    except UnsupportedModelError:
        return [gguf_pattern(wanted) if wanted else f"{WEIGHTS} or *.gguf"]
    return missing_parts(next(iter(models.values())))


def gguf_pattern(wanted: str) -> str:
    """The pattern of the files of a quantization, or of one file."""
    return wanted if wanted.lower().endswith(".gguf") else f"*{wanted}*.gguf"


def missing_weights(directory: Path) -> list[str]:
    """Those that the index names or, without an index, the first part of a model of which another part is here, and
    links to nothing. An index that does not name the file with all weights was left by others; transformers takes that
    file before an index, too."""
    try:
        wanted = read_object(directory / INDEX, missing_is_empty=True).get("weight_map")
    except UnsupportedModelError:
        return [INDEX]
    names = set(map(str, wanted.values())) if isinstance(wanted, dict) else set()
    if WHOLE not in names and (directory / WHOLE).exists():
        return []
    here = {path.name for path in directory.glob(WEIGHTS)}
    names = names or {*here, *missing_parts(sorted(here), PART)}
    return sorted(name for name in names if not os.path.exists(directory / name)) or ([] if here else [WEIGHTS])


def missing_of_modules(directory: Path) -> list[str]:
    """Files of the modules that modules.json names. What is no list of modules is refused when it is read."""
    try:
        modules = read(directory / "modules.json")
        places = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in modules]
    except (UnsupportedModelError, TypeError, KeyError):
        return []
    names = [os.path.join(place, name) for kind, place in places for name in MODULE_FILES.get(kind, ())]
    return [name for name in names if not os.path.isfile(directory / name)]


def is_tokenizer_code(directory: Path) -> bool:
    """Whether the tokenizer is only Python code, so that no other file of it is missing."""
    try:
        return "auto_map" in read_object(directory / "tokenizer_config.json", missing_is_empty=True)
    except UnsupportedModelError:
        return False
