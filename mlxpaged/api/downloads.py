"""Downloads of models from the hub into the local cache, each on a thread of its own.

The endpoint that asks for them is in ollama/pull.py.
"""

from __future__ import annotations

import asyncio
import logging
from fnmatch import fnmatch
from pathlib import Path

from mlxpaged.api.errors import RETRY, ApiError
from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.models.device_memory import loaded_memory
from mlxpaged.models.sources import hub
from mlxpaged.models.sources.preflight import weight_files

logger = logging.getLogger(__name__)

MAX_DOWNLOADS = 4
"""Downloads at once. More would only share the network."""


class Download:
    """The download of a repository. It goes on if no client waits for it: the hub's library cannot be interrupted."""

    def __init__(self, name: str) -> None:
        """Must be called on the event loop."""
        self.name = name
        self.total = 0
        self._files: list[str] = []
        self._directory: Path | None = None
        self._ended = asyncio.wrap_future(in_daemon_thread(self._fetch, "mlxpaged-download"))
        self._ended.add_done_callback(self._log)

    @property
    def done(self) -> bool:
        return self._ended.done()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for the end, at most for these seconds. The caller may be cancelled."""
        await asyncio.wait([self._ended], timeout=seconds)

    def raise_if_failed(self) -> None:
        """Raises what the download ended with: ModelNotFoundError, UnsupportedModelError, or any error of a library."""
        self._ended.result()

    def completed(self) -> int:
        """Bytes that are on the disk, at most `total`. It reads the disk. Other files of the repository do not count,
        for it may have several quantizations."""
        if self._directory is None:
            return 0
        found = 0
        parts = (self._directory.parent.parent / "blobs").glob("*.incomplete")
        for path in (*(self._directory / file for file in self._files), *parts):
            try:
                found += path.stat().st_size
            except OSError:  # it is not there yet, or a part has just got its final name
                continue
        return min(found, self.total)

    def _fetch(self) -> Path:
        # Models that are loaded now can be unloaded for this one.
        found = hub.download_small_files(self.name, reclaimable_bytes=loaded_memory())
        weights: tuple[str, ...] = ()
        if found is not None:
            directory, sizes = found
            weights = tuple(weight_files(sizes))
            wanted = [*hub.SMALL_FILES, *weights]
            self._files = [file for file in sizes if any(fnmatch(file, pattern) for pattern in wanted)]
            self.total = sum(sizes[file] or 0 for file in self._files)
            self._directory = directory
        return hub.download_weights(self.name, weights)

    def _log(self, ended: asyncio.Future[Path]) -> None:
        if (error := ended.exception()) is None:
            logger.info("%s is downloaded", self.name)
        else:
            logger.warning("%s is not downloaded: %s", self.name, error)


class Downloads:
    """Those that are in flight. Only the event loop may use it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Download] = {}

    def start(self, name: str) -> Download:
        """Begin to download a repository, or return the download of it that is in flight. Raises ApiError."""
        self._by_name = {each.name: each for each in self._by_name.values() if not each.done}
        if name not in self._by_name:
            if len(self._by_name) >= MAX_DOWNLOADS:
                message = f"{len(self._by_name)} models are being downloaded, the most at once; try again later"
                raise ApiError(503, message, "server_error", code="too_many_downloads", headers=RETRY)
            logger.info("%s is being downloaded", name)
            self._by_name[name] = Download(name)
        return self._by_name[name]
