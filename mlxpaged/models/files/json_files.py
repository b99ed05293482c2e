"""Reads the JSON files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import check_file

CONFIG = "config.json"
MAX_VALUES = 320_000
"""Keys of a file, or commas, unless it is an index of weights. A tokenizer_config.json of 40,000 added tokens has
280,000. Other threads wait while it is parsed."""


def read(path: Path) -> Any:
    """Raises UnsupportedModelError if there is no such file, if it may not be opened, if it is not JSON, or if it has
    too many values."""
    check_file(path)
    try:
        text = path.read_text()
        count = max(text.count('":'), text.count(","))
        if count > MAX_VALUES and not path.name.endswith(".index.json"):
            raise UnsupportedModelError(f"its {path.name} has {count:,} values; the limit is {MAX_VALUES:,}")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
        raise UnsupportedModelError(f"its {path.name} in {path.parent.name}/ cannot be read: {error}") from error


def read_object(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """Does what `read` does. Raises UnsupportedModelError too if the file holds anything but an object."""
    if missing_is_empty and not path.exists():
        return {}
    found = read(path)
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"its {path.name} in {path.parent.name}/ is not an object")
    return found


def model_config(directory: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """The config.json of a model. Raises UnsupportedModelError as `read_object` does."""
    return read_object(directory / CONFIG, missing_is_empty)
