"""Keeps measured times between starts: one JSON file with an entry for each machine and layer shape.

No error here is fatal. A file that cannot be read counts as empty; if it cannot be written, the next start measures
again. Both log a warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpaged.attention import kernels

logger = logging.getLogger(__name__)

FORMAT = 1
"""To be increased if the same classes and candidates come to mean other launches or workloads."""

Times = dict[str, dict[str, float]]
"""Seconds by shape class and choice, both as text."""


@dataclass(frozen=True)
class Machine:
    """What a time depends on besides the shape. kernels: hash of the sources."""

    chip: str
    system: str
    mlx: str
    kernels: str

    @classmethod
    def current(cls) -> Machine:
        return cls(
            chip=str(mx.device_info().get("device_name", platform.machine())),
            system=f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.platform(),
            mlx=version("mlx"),
            kernels=kernels.source_hash(),
        )


def default_path() -> Path:
    """In the user's cache directory. Raises RuntimeError if the user has no home directory."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxpaged" / "attention_tuning.json"
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "mlxpaged" / "attention_tuning.json"


class TuningCache:
    """The entries of this machine in the file at `path`; None for the default file."""

    def __init__(self, path: Path | None = None, machine: Machine | None = None) -> None:
        self.path = path
        self._machine = machine or Machine.current()

    def load(self, key: str) -> Times | None:
        """The times that were saved under `key` on such a machine."""
        for entry in self._entries():
            if self._is_for(entry, key):
                try:
                    return checked_times(entry["times"])
                except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                    logger.warning("the cached attention times of %s are ignored: %r", key, error)
        return None

    def save(self, key: str, times: Times) -> None:
        """Replace the entry of `key`. Entries of this chip with other system, MLX or kernel versions are dropped. Those
        of other chips stay, because home directories move between machines."""
        kept = [entry for entry in self._entries() if not self._is_for(entry, key) and not self._is_stale(entry)]
        entry = {"machine": asdict(self._machine), "key": key, "times": times}
        try:
            write_atomically(self.path or default_path(), {"format": FORMAT, "entries": [*kept, entry]})
        except (OSError, RuntimeError) as error:
            logger.warning("attention times could not be saved, the next start measures again: %s", error)

    def _entries(self) -> list[Any]:
        try:
            content = json.loads((self.path or default_path()).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                return []
            return list(content["entries"])
        except FileNotFoundError:
            return []
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            logger.warning("cached attention times cannot be read and are measured again: %r", error)
            return []

    def _is_for(self, entry: Any, key: str) -> bool:
        return isinstance(entry, dict) and entry.get("machine") == asdict(self._machine) and entry.get("key") == key

    def _is_stale(self, entry: Any) -> bool:
        machine = entry.get("machine") if isinstance(entry, dict) else None
        if not isinstance(machine, dict):
            return True
        return machine.get("chip") == self._machine.chip and machine != asdict(self._machine)


def checked_times(times: Any) -> Times:
    """Raises an error if these are not times."""
    for by_choice in times.values():
        if not by_choice or not all(math.isfinite(seconds) and seconds > 0 for seconds in by_choice.values()):
            raise ValueError(f"not positive times: {by_choice}")
    checked: Times = times
    return checked


def write_atomically(path: Path, content: Any) -> None:
    """Readers see either the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
