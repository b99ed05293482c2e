"""Chooses one of the GGUF files of a directory or repository, which often has the same model in twenty quantizations.
Nothing here imports mlx or numpy."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import MAX_FILES

GROWTHS = {r"IQ[12]_": 2.0, r"(IQ3|Q[23])_": 1.65, r"IQ4_": 1.45}
GROWTH = 1.12
"""At most the memory of the weights, divided by the size of the file, by what its name has; that of other files."""
ROOM = 0.7
"""Share of the free memory for the weights; the rest is for the KV cache."""

PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)
OTHERS = re.compile(r"(^|[-._/])mmproj|imatrix|(^|/)\._", re.IGNORECASE)
"""Towers for images, statistics of a quantization, and what macOS writes beside each file on some external disks."""
TERNARY, CODE_BOOKS = (re.compile(rf"(^|[-._/]){kinds}_", re.IGNORECASE) for kinds in ("TQ[12]", "IQ[123]"))
"""Quantizations that are not loaded, and those that need a package."""
QUANTIZATION = re.compile(r"(.*/.*):([A-Za-z0-9_.-]+)", re.DOTALL)
FILE = re.compile(r"([^/.~][^/]*/[^/]+)/(.+\.gguf)", re.IGNORECASE | re.DOTALL)


def split_name(name: str) -> tuple[str, str]:
    """The repository or directory of a name such as OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf, and what follows; empty
    if nothing does."""
    found = FILE.fullmatch(name) or QUANTIZATION.fullmatch(name)
    return (name, "") if found is None else (found[1], "" if found[2] == "latest" else found[2])


def gguf_sizes(directory: Path) -> dict[str, int]:
    """Bytes of the GGUF files in a directory and its subdirectories, by their paths in it. Raises OSError, and
    UnsupportedModelError if there are too many files."""
    found: dict[str, int] = {}
    for count, path in enumerate(itertools.chain(directory.iterdir(), directory.glob("[!.]*/*"))):
        if count == MAX_FILES:
            raise UnsupportedModelError(f"its directory has more than {MAX_FILES:,} files")
        if path.suffix.lower() == ".gguf" and path.is_file():
            found[str(path.relative_to(directory))] = path.stat().st_size
    return found


def begins_model(name: str) -> bool:
    """Whether a file is a language model in GGUF, or the first part of one, by its name."""
    part = PART.search(name)
    return is_gguf_model(name) and (part is None or int(part[1]) == 1)


def models_with(sizes: Mapping[str, int | None], files: list[str]) -> dict[str, int | None]:
    """The GGUF files of the models that have one of these files."""
    names = {PART.sub("", file) for file in files if is_gguf_model(file)}
    return {file: size for file, size in sizes.items() if is_gguf_model(file) and PART.sub("", file) in names}


def is_gguf_model(name: str) -> bool:
    """Whether a file is a language model, or a part of one, by its name."""
    return name.lower().endswith(".gguf") and OTHERS.search(name) is None


def models_of(sizes: Mapping[str, int | None], wanted: str) -> dict[str, list[str]]:
    """The files of each model in order, by its name without the number of a part; the whole models, if there is one.
    wanted: as `choose` has it. Raises UnsupportedModelError if there is no such file."""
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        if is_gguf_model(name):
            models.setdefault(PART.sub("", name), []).append(name)
    if not models:
        raise UnsupportedModelError("it has no GGUF file of a language model")
    if wanted:
        is_wanted = re.compile(rf"(^|[-._/]){re.escape(wanted)}($|[-./])", re.IGNORECASE).search
        found = {name: files for name, files in models.items() if wanted in files or is_wanted(name)}
        if not found:
            raise UnsupportedModelError(f"it has no GGUF file {wanted}, but {', '.join(models)}")
        models = found
    return {name: files for name, files in models.items() if not missing_parts(files)} or models


def missing_parts(files: Sequence[str], pattern: re.Pattern[str] = PART) -> list[str]:
    """The name of the first part that is not among a model's files, in order; empty if all are there, or it has no
    parts. pattern: of the end of a part's name, with its number, the number of parts, and the suffix."""
    parts = [part for name in files if (part := pattern.search(name))]
    for number, part in enumerate(parts, start=1):
        if int(part[1]) != number:
            return [part_name(part, number)]
    return [part_name(parts[-1], len(parts) + 1)] if parts and len(parts) < int(parts[-1][2]) else []


def part_name(part: re.Match[str], number: int) -> str:
    return f"{part.string[: part.start()]}-{number:05}-of-{part[2]}{part[3]}"


def choose(sizes: Mapping[str, int | None], wanted: str, free_bytes: int) -> list[str]:
    """The files of the model to load, in order. wanted: the quantization or the file that the user has named; the
    largest that fits if it is empty, of those that can be loaded. Raises UnsupportedModelError, with what there is, if
    there is no such file."""
    models = models_of(sizes, wanted)
    if not wanted:
        models = {name: files for name, files in models.items() if can_be_loaded(name)} or models
    by_size = sorted(models.values(), key=lambda files: sum(sizes[name] or 0 for name in files))
    fitting = [files for files in by_size if memory_of({name: sizes[name] for name in files}) <= ROOM * free_bytes]
    return (fitting or by_size[:1])[-1]


def has_code_books() -> bool:
    """Whether the package `gguf` is installed. It is not loaded."""
    return importlib.util.find_spec("gguf") is not None


def can_be_loaded(name: str) -> bool:
    """Whether a file has a quantization that is loaded here, by its name."""
    return not TERNARY.search(name) and (has_code_books() or not CODE_BOOKS.search(name))


def memory_of(sizes: Mapping[str, int | None]) -> int:
    """Bytes that the weights of some files take in memory, at most, by their names and sizes."""
    return int(sum((size or 0) * growth_of(name) for name, size in sizes.items()))


def growth_of(name: str) -> float:
    return next((growth for kind, growth in GROWTHS.items() if re.search(kind, name, re.IGNORECASE)), GROWTH)
