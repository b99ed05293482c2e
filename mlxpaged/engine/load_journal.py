"""Notes which model is being loaded, so that one that kills the process is not loaded at each start of a service."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from mlxpaged import __version__
from mlxpaged.engine_config import EngineConfig
from mlxpaged.journal import Journal
from mlxpaged.models.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 3600.0
"""A model whose load has killed two processes is loaded again after this time: the memory that was missing may be free
then. A service manager tries it every 30 seconds."""


class LoadJournal:
    """Any thread may use it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """clock: Unix time. Raises OSError, also if another process has the journal open."""
        self._path, self._clock = path, clock
        self._journal = Journal(path)
        self._closed = False
        self._lock = threading.RLock()  # a signal's handler may close it while this thread does

    @contextlib.contextmanager
    def loading(self, config: EngineConfig) -> Iterator[None]:
        """A model is loaded in this context. If that cannot be noted, it is loaded all the same. Raises
        UnsupportedModelError if processes have died of it."""
        name = name_of(config)
        with self._lock:
            try:
                if not self._closed and not self._path.exists():  # the user has deleted it
                    self._journal.close()
                    self._journal = Journal(self._path)
                self._require_harmless(config.model, name)
                self._journal.begin(name)
            except OSError as error:
                logger.warning("the load of a model is not noted in %s: %s", self._path, error)
        try:
            yield
        finally:
            with self._lock:
                self._journal.end(name)

    def _require_harmless(self, model: str, name: str) -> None:
        if not self._journal.has_killed(name):
            return
        deaths = self._journal.suspects[name]
        minutes = (deaths.last + RETRY_SECONDS - self._clock()) / 60
        if 0 < minutes <= RETRY_SECONDS / 60:
            raise UnsupportedModelError(
                f"{model!r} is not loaded: the process died {deaths.times} times while it loaded the model. It is "
                f"tried again in {minutes:.0f} minutes, or with other flags, or at once after `rm {self._path}`"
            )

    def close(self) -> None:
        """The process ends as it should: a load that has not ended counts for nothing."""
        with self._lock:
            self._closed = True
            self._journal.close()


def name_of(config: EngineConfig) -> str:
    """A model with its flags and the versions that load it: with others, it may be harmless."""
    content = repr((config, __version__, version("mlx")))
    return f"{config.model} {hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()[:16]}"
