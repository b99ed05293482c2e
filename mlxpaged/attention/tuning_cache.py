"""Keeps measured times between starts, in one JSON file.

No error here is fatal. If the file cannot be read, it counts as empty. If it cannot be written, the next start measures
again. Both cases log a warning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpaged import macos
from mlxpaged.attention import kernels
from mlxpaged.attention.tuning import Choice, ShapeClass, parse_choice
from mlxpaged.durable_files import replacing

logger = logging.getLogger(__name__)

FORMAT = 3
"""Increase it if the same classes and choices come to mean other launches or workloads."""

Times = dict[ShapeClass, dict[Choice, float]]
"""Seconds per call by class and choice."""


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
            system=f"macOS {macos.version()}" if sys.platform == "darwin" else platform.platform(),
            mlx=version("mlx"),
            kernels=kernels.source_hash(),
        )

    @property
    def versions(self) -> str:
        return f"{self.system}, MLX {self.mlx}, kernels {self.kernels}, format {FORMAT}"


def default_path() -> Path:
    """A file in the user's cache directory. Raises RuntimeError if the user has no home directory."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxpaged" / "attention_tuning.json"
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".cache"
    return base / "mlxpaged" / "attention_tuning.json"


class TuningCache:
    """The times of this machine in the file at `path`; None for the default file.

    The file has nested JSON objects: by chip, versions, key (a layer shape), class and choice. It keeps the
    times of other chips, because home directories move between machines.
    """

    def __init__(self, path: Path | None = None, machine: Machine | None = None) -> None:
        self.path = path
        self._machine = machine or Machine.current()

    def load(self, key: str, classes: Iterable[ShapeClass]) -> Times:
        """The times that were saved under `key` on such a machine; empty if there are none."""
        class_of = {str(entry): entry for entry in classes}
        try:
            stored = self._of_this_machine(self._read()).get(key, {}).items()
            return {class_of[name]: checked_times(by_choice) for name, by_choice in stored}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            logger.warning("the cached attention times of %s are ignored: %r", key, error)
            return {}

    def save(self, key: str, times: Times) -> None:
        """Replace the times of `key`. Times of this chip with other system, MLX or kernel versions are dropped."""
        content = self._read()
        texts = {str(entry): {str(choice): t for choice, t in by_choice.items()} for entry, by_choice in times.items()}
        kept = self._of_this_machine(content)
        content[self._machine.chip] = {self._machine.versions: kept | {key: texts}}
        try:
            path = self.path or default_path()
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(json.dumps(content, indent=1).encode())
        except (OSError, RuntimeError) as error:
            logger.warning("attention times could not be saved, the next start measures again: %s", error)

    def _of_this_machine(self, content: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
        return content.get(self._machine.chip, {}).get(self._machine.versions, {})

    def _read(self) -> dict[str, dict[str, dict[str, Any]]]:
        try:
            content = json.loads((self.path or default_path()).read_text(encoding="utf-8"))
            return {chip: {name: dict(keys) for name, keys in versions.items()} for chip, versions in content.items()}
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, AttributeError, TypeError, ValueError) as error:
            logger.warning("cached attention times cannot be read and are measured again: %r", error)
            return {}


def checked_times(by_choice: dict[str, Any]) -> dict[Choice, float]:
    """The times by choice. Raises an error of any type if the texts are not choices, or the values not times."""
    if not by_choice or not all(math.isfinite(seconds) and seconds > 0 for seconds in by_choice.values()):
        raise ValueError(f"not positive times: {by_choice}")
    return {parse_choice(text): seconds for text, seconds in by_choice.items()}
