"""Lets a package export names of its modules that are imported only when a name is first used.

The engine takes two seconds to import, and `mlxpaged serve --help` needs the defaults of its configuration only.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORT = re.compile(r"^ +from (\S+) import (\([^)]*\)|.+)$", re.MULTILINE)


def lazy_names(package: str, path: str) -> Callable[[str], Any]:
    """Returns `__getattr__` for a package (PEP 562). It imports what the package imports under `if TYPE_CHECKING:`, so
    that type checkers and this function read the same lines. path: of the package's __init__.py."""
    modules = {
        name.strip(): module
        for module, names in IMPORT.findall(Path(path).read_text(encoding="utf-8"))
        for name in names.strip("()").split(",")
        if name.strip()
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, found)  # the next use does not come here
        return found

    return get
