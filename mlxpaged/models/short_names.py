"""Short names of models, such as qwen3.6:35b, by the table in short_names.toml. Nothing here imports mlx."""

from __future__ import annotations

import functools
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

DEMO_MODEL = "demo"

TABLE = Path(__file__).with_suffix(".toml")
"""Its first lines say where its figures come from."""


class ShortName(NamedTuple):
    """repository: on the hub. model_type: of its config.json. parameters: in billions. bytes: of the weights, about.
    kind: "generate", "embeddings" or "reranker"."""

    repository: str
    model_type: str
    parameters: float
    bytes: int
    kind: str


@functools.cache
def short_names() -> dict[str, ShortName]:
    """By the short name, in the order of the file."""
    from mlxpaged import toml

    rows = toml.loads(TABLE.read_text(encoding="utf-8"))
    return {name: ShortName(**row) for name, row in rows.items()}


def full_name(name: str) -> str:
    """The hub repository of a short name, in any case. Any other name is returned as it is: of a directory, a
    repository or the demo model."""
    found = short_names().get(name.lower()) if ":" in name else None
    return name if found is None else found.repository


def short_name(repository: str) -> str | None:
    """The short name of a hub repository, if it has one."""
    return next((name for name, row in short_names().items() if row.repository == repository), None)


def near_names(name: str) -> list[str]:
    """Short names that the user may have meant: all sizes of "qwen3", or those that are spelt like `name`."""
    family = [each for each in short_names() if each.partition(":")[0] == name.lower().partition(":")[0]]
    return family or get_close_matches(name.lower(), short_names(), n=3, cutoff=0.5)


def largest_within(free_bytes: float, kind: str = "generate") -> str | None:
    """The short name of the largest model of a kind whose weights fit."""
    fitting = [(row.bytes, name) for name, row in short_names().items() if row.kind == kind and row.bytes <= free_bytes]
    return max(fitting)[1] if fitting else None
