"""The Python of other processes that run this package."""

from __future__ import annotations

import sys

SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
PYTHON = (sys.executable, *SAFE_PATH)
"""With `-m` alone, an import would find the files of the working directory first: someone's `queue.py`, or what a
repository brings in which `mlxpaged launch` starts an agent. Python 3.10 has no flag against it."""
