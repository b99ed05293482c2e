"""The formats of tool calls that mlx-lm can read. Nothing here imports mlx."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path


def tool_parsers() -> list[str]:
    """The names of mlx-lm's tool-call parsers."""
    found = importlib.util.find_spec("mlx_lm")
    assert found is not None  # a dependency
    folders = [str(Path(folder) / "tool_parsers") for folder in found.submodule_search_locations or ()]
    return sorted(module.name for module in pkgutil.iter_modules(folders))
