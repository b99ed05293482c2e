"""Short names of models, such as qwen3.6:35b, by the table in short_names.toml. Nothing here imports mlx."""

from __future__ import annotations

import functools
import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from mlxpaged.models.files.kinds import Kind

DEMO_MODEL = "demo"

BUNDLED = {DEMO_MODEL: "demo", "demo-vision": "demo_vision"}
"""The models that come with the package, and their directories in mlxpaged/models/."""

TABLE = Path(__file__).with_suffix(".toml")
"""Its first lines say where its figures come from."""

HUB_ADDRESS = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)"
    r"([\w.-]+/[\w.-]+(?::[\w.-]+)?)(?:/(?:tree|blob)/main(?:/[^?#]*)?)?/?(?:[?#].*)?",
    flags=re.IGNORECASE,
)
"""The address of a repository, as a browser shows it or as Ollama takes it. A revision other than main is not taken:
the newest files would be served instead."""

LATEST = ":latest"
"""Ollama and its clients add this tag to a name that has none."""

OLDER_NAMES = {"llama3": "llama3.1"}
"""Families that are not in the table, and the ones that take their place."""


class ShortName(NamedTuple):
    """repository: on the hub. model_type: of its config.json. parameters: in billions. bytes: of the weights, about.
    kind: of the original model. good_for: what its publisher describes it for. default: whether
    its family's name stands for it."""

    repository: str
    model_type: str
    parameters: float
    bytes: int
    kind: Kind
    good_for: str
    default: bool = False


@functools.cache
def short_names() -> dict[str, ShortName]:
    """The names by short name, in the order of the file."""
    from mlxpaged import toml

    rows = toml.loads(TABLE.read_text(encoding="utf-8"))
    return {name: ShortName(**row | {"kind": Kind(row["kind"])}) for name, row in rows.items()}


def without_address(name: str) -> str:
    """The repository of an address of the hub. Any other name is returned as it is."""
    found = HUB_ADDRESS.fullmatch(name.strip())
    return name if found is None else found[1]


def full_name(name: str) -> str:
    """The hub repository of a short name, in any case, or of an address of the hub. Any other name is returned as it
    is: of a directory, a repository or a bundled model."""
    name = without_address(name)
    found = short_names().get(default_name(name) or name.lower())
    return name if found is None else found.repository


def default_name(name: str) -> str | None:
    """The short name that a family's name without a tag stands for. None if the name has a tag, if there is no such
    family, or if a directory has this name."""
    family = name.lower().removesuffix(LATEST)
    family = OLDER_NAMES.get(family, family)
    rows = [(each, row) for each, row in short_names().items() if each.partition(":")[0] == family]
    if not rows or Path(name).is_dir():
        return None
    return rows[0][0] if len(rows) == 1 else next(each for each, row in rows if row.default)


def taken(name: str) -> str | None:
    """Says which model a name without a tag stands for. None if the name is no such name."""
    found = default_name(name)
    return None if found is None else f"{name} stands for {found} ({short_names()[found].repository})"


def short_name(repository: str) -> str | None:
    """The short name of a hub repository, if it has one."""
    return next((name for name, row in short_names().items() if row.repository == repository), None)


def near_names(name: str) -> list[str]:
    """Short names that the user may have meant: all sizes of "qwen3", or those that are spelt like `name`."""
    family = [each for each in short_names() if each.partition(":")[0] == name.lower().partition(":")[0]]
    return family or get_close_matches(name.lower(), short_names(), n=3, cutoff=0.5)


def largest_within(free_bytes: float) -> str | None:
    """The short name of the largest model that generates text and whose weights fit."""
    fitting = [
        (row.bytes, name) for name, row in short_names().items() if row.kind.generates and row.bytes <= free_bytes
    ]
    return max(fitting)[1] if fitting else None
