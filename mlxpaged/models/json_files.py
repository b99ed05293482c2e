"""Reads the JSON files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files import check_file


def read(path: Path) -> Any:
    """Raises UnsupportedModelError if there is no such file, if it may not be opened, or if it is not JSON."""
    check_file(path)
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: it is nested too deeply
        raise UnsupportedModelError(f"its {path.name} in {path.parent.name}/ cannot be read: {error}") from error


def read_object(path: Path, missing_is_empty: bool = False) -> dict[str, Any]:
    """As `read`. Raises UnsupportedModelError too if the file holds anything but an object."""
    if missing_is_empty and not path.exists():
        return {}
    found = read(path)
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"its {path.name} in {path.parent.name}/ is not an object")
    return found
