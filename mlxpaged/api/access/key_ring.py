"""Holds the API keys of the server, and reads their file again when it changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from mlxpaged.api.access.caller import Caller
from mlxpaged.api.access.key_file import KeyEntry, KeyFileError, read
from mlxpaged.api.access.key_usage import UsageLedger, usage_path
from mlxpaged.api.access.rate_limit import Allowance
from mlxpaged.core.scheduling.sequence import Priority

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""The file is checked for changes at most this often."""
OTHERS_MAY_READ = 0o077


class KeyRing:
    def __init__(self, path: Path, clock: Callable[[], float], now: Callable[[], float] = time.time) -> None:
        """clock: seconds. now: Unix time. Raises KeyFileError if the file cannot be used."""
        self._path = path
        self._clock = clock
        self._checked_at = clock()
        self._seen: tuple[int, int, int] | None = None
        self._keys: list[tuple[KeyEntry, Caller]] = []
        self.usage = UsageLedger(usage_path(path), now)
        self._load()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: str) -> Caller | None:
        """Returns the owner of this key. It is compared with every key, so that the time taken reveals nothing."""
        self._follow_the_file()
        found = None
        for entry, caller in self._keys:
            if entry.matches(presented):
                found = caller
        return found

    def _follow_the_file(self) -> None:
        """If the file cannot be used, an error is logged and the keys stay as they were."""
        if self._clock() - self._checked_at < CHECK_SECONDS:
            return
        self._checked_at = self._clock()
        try:
            seen: tuple[int, int, int] | None = signature(os.stat(self._path))
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen  # so that an error is logged once
        try:
            self._load()
        except KeyFileError as error:
            logger.error("%s; the API keys that were loaded before stay in use", error)

    def _load(self) -> None:
        content, state = read(self._path)
        self._seen = signature(state)
        if state.st_mode & OTHERS_MAY_READ:
            logger.warning("%s can be read by other users: chmod 600 it", self._path)
        before = {caller.name: caller.allowance for _, caller in self._keys}
        salts = {entry.name: entry.salt for entry in content.keys}
        self.usage.remove(entry.name for entry, _ in self._keys if salts.get(entry.name) != entry.salt)
        self._keys = [(entry, self._caller(entry, before.get(entry.name))) for entry in content.keys]
        self.usage.keep(salts)
        logger.info("%d API keys from %s", len(self._keys), self._path)

    def named(self, name: str) -> Caller | None:
        """Returns the owner of the key with this name, or None if it was removed."""
        self._follow_the_file()
        return next((caller for _, caller in self._keys if caller.name == name), None)

    def _caller(self, entry: KeyEntry, before: Allowance | None) -> Caller:
        """before: the key's allowance so far, which stays in use unless its limits have changed."""
        allowance = Allowance(entry.requests_per_minute, entry.tokens_per_minute, self._clock)
        if before is not None and before.limits == allowance.limits:
            allowance = before
        default, highest = (Priority[tier.upper()] for tier in (entry.tier, entry.max_priority or entry.tier))
        models = None if entry.models is None else frozenset(entry.models)
        meter = self.usage.meter(entry.name)
        return Caller(entry.name, default, highest, entry.admin, entry.metrics, allowance, meter, models)


def signature(state: os.stat_result) -> tuple[int, int, int]:
    """Changes with the file. Its change time follows the owner and the permissions too: a file that could not be read
    is read once it can be. The inode distinguishes files of one size that were written at the same time."""
    return state.st_ctime_ns, state.st_size, state.st_ino
