"""Places that have models, such as Ollama's folder. A name that begins with a place's prefix and a colon is of a model
there. Nothing here imports mlx."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlxpaged.addons import Table
from mlxpaged.models.errors import ModelNotFoundError, in_one_line
from mlxpaged.models.sources.downloads import Download
from mlxpaged.models.sources.short_names import LATEST, short_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A place that has models.

    find: the path of a model by its name, without the prefix: of a GGUF file, or of a directory with config.json, the
    files of the tokenizer, and weights as safetensors or GGUF. A directory with several GGUF files may be followed by
    ":" and a quantization. It raises ModelNotFoundError, whose message the client sees. The name can be that of a
    request from another machine; it is then relative and without "..". So `find` must not download what only the user
    may download. It is called on any thread, and may block. models: those that are on this machine, with the prefix in
    their names. listed: what such a name has after the prefix, for a name that `find` takes. The files of a model must
    stay where they are while it is served.
    """

    find: Callable[[str], Path]
    models: Callable[[], Iterable[Download]] = tuple
    listed: Callable[[str], str] = lambda name: name.removesuffix(LATEST)  # clients of Ollama add it


def problem(prefix: str, source: Source) -> str | None:
    """Short names have the form of a name with a prefix."""
    taken = {name.partition(":")[0] for name in short_names()}
    return f"short names of models begin with {prefix}:" if prefix in taken else None


SOURCES: Table[Source] = Table("sources", Source, problem)
"""The sources by their prefixes."""


def source_path(name: str) -> Path | None:
    """The path of a model of a source; None for a name without the prefix of one. Raises ModelNotFoundError or
    OSError."""
    prefix, colon, own = name.partition(":")
    if not colon or (source := SOURCES.get(prefix)) is None:
        return None
    try:
        return Path(source.find(own))
    except (ModelNotFoundError, OSError):
        raise
    except Exception as error:  # an add-on of another package can raise anything
        raise ModelNotFoundError(f"{name} cannot be found: {type(error).__name__}: {in_one_line(error)}") from error


def source_models() -> list[Download]:
    """The models of all sources, in the order of their names."""
    found: dict[str, Download] = {}
    for prefix, source in SOURCES.items():
        try:
            found |= {each.name: each for each in source.models()}
        except Exception as error:  # likewise
            logger.warning("the models of %s: cannot be listed: %s: %s", prefix, type(error).__name__, error)
    return [found[name] for name in sorted(found)]


def is_inside(name: str) -> bool:
    """Whether a name can be a path within a folder. A request from another machine may have it."""
    return not name.startswith("/") and ".." not in name.split("/")
