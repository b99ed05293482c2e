"""Names an adapter that is to be served. It is imported without MLX, for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class AdapterPath(NamedTuple):
    """An adapter that is to be served: its name in the API, and its directory."""

    name: str
    path: Path
