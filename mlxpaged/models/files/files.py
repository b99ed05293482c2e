"""Which files of a model's directory may be opened: regular ones, and no text file above its limit.

A directory can be hostile or damaged. A FIFO or a device would block the thread that reads it, and a JSON file of
gigabytes would take all memory. mlx-lm and transformers open most of the files, so they are checked before.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatch
from pathlib import Path

from mlxpaged.models.errors import UnsupportedModelError

MAX_FILES = 10_000
"""Files of a directory. A repository has some hundred."""

MAX_BYTES = {
    "tokenizer.json": 2**28,
    "tekken.json": 2**28,
    "vocab.json": 2**28,
    "*.index.json": 2**28,
    "generation_config.json": 2**20,
    "*.json": 2**24,
    "*.jinja": 2**20,
    "*.txt": 2**28,
    "*.model": 2**28,
    "*.tiktoken": 2**28,
}
"""The first pattern that fits a name decides. A tokenizer.json of 260,000 tokens has 33 MB (Gemma 3). Other JSON is
larger than 1 MB only if it lists added tokens."""

TEMPLATES = "additional_chat_templates"
"""The only subdirectory that transformers looks into by itself."""

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_files(directory: Path) -> None:
    """Raises UnsupportedModelError if a file of the directory is not regular, or too large. Links to regular files
    pass: the cache of the hub has nothing else."""
    for each in (directory, directory / TEMPLATES):
        if each.is_dir():
            check_entries(each)


def check_entries(directory: Path) -> None:
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count == MAX_FILES:
                raise UnsupportedModelError(f"its directory has more than {MAX_FILES:,} files")
            check_file(Path(entry.path))


def check_file(path: Path) -> None:
    """Raises UnsupportedModelError. A path without a file passes: to open it fails at once."""
    try:
        found = path.stat()
    except OSError:  # no such file, or a link to nothing
        return
    if kind := KINDS.get(stat.S_IFMT(found.st_mode)):
        raise UnsupportedModelError(f"its {path.name} is {kind} instead of a regular file")
    limit = next((limit for pattern, limit in MAX_BYTES.items() if fnmatch(path.name, pattern)), None)
    if limit is not None and stat.S_ISREG(found.st_mode) and found.st_size > limit:
        raise UnsupportedModelError(
            f"its {path.name} has {found.st_size / 1e6:,.1f} MB; such a file has at most {limit / 1e6:,.1f} MB"
        )
