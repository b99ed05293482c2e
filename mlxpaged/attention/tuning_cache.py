"""Measured times between two starts: one JSON file, an entry for each machine and layer shape.

Nothing here is fatal. A file that cannot be read or understood counts as empty, one that cannot be written is measured
again at the next start; both are warned of.
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
"""To be raised where the same classes and candidates come to mean something else: other launches, other workloads."""

Times = dict[str, dict[str, float]]
"""Seconds by shape class and choice, both as text."""


@dataclass(frozen=True)
class Machine:
    """What a time depends on beside the shape. kernels: hash of the sources."""

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
    """In the system's place for what can be made again. Raises RuntimeError where the user has no home directory."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxpaged" / "attention_tuning.json"
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "mlxpaged" / "attention_tuning.json"


class TuningCache:
    """The file at `path`, None for the default one, seen from this machine."""

    def __init__(self, path: Path | None = None, machine: Machine | None = None) -> None:
        self._path = path
        self._machine = machine or Machine.current()

    def load(self, key: str) -> Times | None:
        """What `save` was given under `key` on such a machine."""
        for entry in self._entries():
            if self._is_for(entry, key):
                try:
                    return checked_times(entry["times"])
                except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                    logger.warning("the measured attention times of %s do not count: %r", key, error)
        return None

    def save(self, key: str, times: Times) -> None:
        """Replace the entry of `key`. Entries of this chip under another system, MLX or kernel version are dropped:
        nobody goes back to them. Those of other chips stay, home directories move."""
        kept = [entry for entry in self._entries() if not self._is_for(entry, key) and not self._is_stale(entry)]
        entry = {"machine": asdict(self._machine), "key": key, "times": times}
        try:
            write_atomically(self._path or default_path(), {"format": FORMAT, "entries": [*kept, entry]})
        except (OSError, RuntimeError) as error:
            logger.warning("attention times are not kept, the next start measures again: %s", error)

    def _entries(self) -> list[Any]:
        try:
            content = json.loads((self._path or default_path()).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                return []
            return list(content["entries"])
        except FileNotFoundError:
            return []
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            logger.warning("attention times of earlier starts cannot be read and are measured again: %r", error)
            return []

    def _is_for(self, entry: Any, key: str) -> bool:
        return isinstance(entry, dict) and entry.get("machine") == asdict(self._machine) and entry.get("key") == key

    def _is_stale(self, entry: Any) -> bool:
        machine = entry.get("machine") if isinstance(entry, dict) else None
        if not isinstance(machine, dict):
            return True
        return machine.get("chip") == self._machine.chip and machine != asdict(self._machine)


def checked_times(times: Any) -> Times:
    """Raises an error where these are not times."""
    for by_choice in times.values():
        if not by_choice or not all(math.isfinite(seconds) and seconds > 0 for seconds in by_choice.values()):
            raise ValueError(f"not positive times: {by_choice}")
    checked: Times = times
    return checked


def write_atomically(path: Path, content: Any) -> None:
    """A reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
