"""Counts what each API key uses, and keeps the sums in a small file beside the file of the keys.

A server adds to the file what it has counted since it last did, so several servers may share the keys and the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from mlxpaged.api.access.key_file import locked
from mlxpaged.durable_files import replacing

logger = logging.getLogger(__name__)

SAVE_SECONDS = 60.0
"""The file is written at most this often, and at the end of the server. A killed server loses what it counted since."""

Count = Annotated[int, Field(ge=0)]


@dataclass
class Usage:
    """What a key has used. cached_tokens: those of the prompt tokens that the prefix cache had. last_used: Unix time of
    the last request, in seconds; 0 for none. month: the last one with tokens, in UTC, for example 2026-11."""

    requests: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0
    last_used: Count = 0
    month: Annotated[str, Field(pattern=r"^(\d{4}-\d{2})?$")] = ""
    month_tokens: Count = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def add(self, other: Usage) -> None:
        """Add what was counted beside this or after it."""
        for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_used = max(self.last_used, other.last_used)
        self.enter(other.month)
        self.month_tokens += other.month_tokens if other.month == self.month else 0

    def enter(self, month: str) -> None:
        """Begin a month, unless it has begun. A clock that is set back begins none."""
        if month > self.month:
            self.month, self.month_tokens = month, 0

    def at(self, now: float) -> Usage:
        """Returns a copy, with the month of this Unix time."""
        found = copy.copy(self)
        found.enter(month_of(now))
        return found


USAGES = TypeAdapter(dict[str, Usage])


def month_of(now: float) -> str:
    """now: Unix time."""
    return datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m")


def usage_path(keys: Path) -> Path:
    """Returns the file for the usage of the keys in the file `keys`."""
    return keys.with_name(f"{keys.stem}.usage.json")


def read(path: Path) -> dict[str, Usage]:
    """Returns the usage of each key, by its name. Raises OSError, or ValueError if the file is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return USAGES.validate_json(content)
    except ValidationError:
        raise ValueError(f"{path} is damaged") from None


def write(path: Path, usages: Mapping[str, Usage]) -> None:
    """The file is readable by its owner only."""
    with replacing(path) as file:
        file.write(USAGES.dump_json(dict(usages), indent=1) + b"\n")


def forget(path: Path, name: str) -> None:
    """Remove a key from the file, if that can be used. A server with the file of keys does it too, later."""
    with contextlib.suppress(OSError, ValueError), locked(path):
        usages = read(path)
        if usages.pop(name, None) is not None:
            write(path, usages)


class Meter:
    """Counts for one key, on the event loop."""

    def __init__(self, kept: Usage, now: Callable[[], float]) -> None:
        """kept: what the file has. now: Unix time."""
        self._kept, self._now = kept, now
        self._saving = Usage()  # what is being added to the file
        self._new = Usage()

    def count(self, requests: int = 0, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """prompt, cached, output: tokens."""
        new = self._new
        self.touch()
        new.requests += requests
        new.prompt_tokens += prompt
        new.cached_tokens += cached
        new.output_tokens += output
        if prompt + output:
            new.enter(month_of(self._now()))
            new.month_tokens += prompt + output

    def touch(self) -> None:
        """A request has come with the key."""
        self._new.last_used = int(self._now())

    @property
    def total(self) -> Usage:
        found = copy.copy(self._kept)
        found.add(self._saving)
        found.add(self._new)
        return found.at(self._now())

    @property
    def kept(self) -> Usage:
        return self._kept

    @property
    def is_saved(self) -> bool:
        return self._new == Usage()

    def begin_saving(self) -> Usage:
        self._saving, self._new = self._new, Usage()
        return self._saving

    def end_saving(self, kept: Usage | None) -> None:
        """kept: what the file has now; None if it could not be written."""
        if kept is None:
            self._saving.add(self._new)
            self._new = self._saving
        else:
            self._kept = kept
        self._saving = Usage()


class UsageLedger:
    """The meters of all keys, by their names."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        """now: Unix time."""
        self.path = path
        self._now = now
        self._meters: dict[str, Meter] = {}
        self._removed: set[str] = set()  # names that the file may have
        self._has_failed = False
        self._kept: dict[str, Usage] = {}
        try:
            self._kept = read(path)
        except (OSError, ValueError) as error:
            logger.warning("%s; the usage of the API keys is counted from 0", error)

    def meter(self, name: str) -> Meter:
        if name not in self._meters:
            self._meters[name] = Meter(self._kept.pop(name, Usage()), self._now)
        return self._meters[name]

    def remove(self, names: Iterable[str]) -> None:
        """Forget keys."""
        for name in names:
            self._meters.pop(name, None)
            self._removed.add(name)

    def keep(self, names: Collection[str]) -> None:
        """Forget all keys but these."""
        self.remove({*self._meters, *self._kept} - {*names})
        self._kept.clear()  # the meters have the rest

    def describe(self) -> list[dict[str, Any]]:
        """Returns the usage of each key, the name first."""
        return [{"name": name} | fields_of(meter.total) for name, meter in sorted(self._meters.items())]

    @contextlib.asynccontextmanager
    async def saved(self) -> AsyncIterator[None]:
        """The file follows the meters until the end of the context."""

        ended = asyncio.Event()

        async def run() -> None:
            while not ended.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ended.wait(), SAVE_SECONDS)
                await self.save()

        task = asyncio.ensure_future(run())
        try:
            yield
        finally:
            ended.set()
            await task

    async def save(self) -> None:
        """Add what is new to the file. If it cannot be written, that is logged once, and tried again next time."""
        meters = {name: meter for name, meter in self._meters.items() if not meter.is_saved}
        if not meters and not self._removed:
            return
        new = {name: meter.begin_saving() for name, meter in meters.items()}
        removed, self._removed = self._removed, set()
        before = {name: meter.kept for name, meter in self._meters.items()}
        kept: dict[str, Usage] = {}
        is_done = False
        try:
            kept = await asyncio.to_thread(self._add, new, removed, before)
            is_done = True
        except OSError as error:
            if not self._has_failed:
                logger.warning("the usage of the API keys cannot be written: %s", error)
            self._has_failed = True
        finally:
            for name, meter in meters.items():
                meter.end_saving(kept[name] if is_done else None)
            if not is_done:
                self._removed |= removed

    def _add(self, new: Mapping[str, Usage], removed: Collection[str], before: Mapping[str, Usage]) -> dict[str, Usage]:
        """Returns what the file has now. before: what it had, in case it is damaged."""
        with locked(self.path):
            try:
                usages = read(self.path)
            except ValueError as error:
                logger.warning("%s; the usage of the API keys is written anew", error)
                usages = {name: copy.copy(usage) for name, usage in before.items()}
            for name in removed:
                usages.pop(name, None)
            for name, usage in new.items():
                usages.setdefault(name, Usage()).add(usage)
            write(self.path, usages)
            return usages


def fields_of(usage: Usage) -> dict[str, Any]:
    """Returns the fields as JSON. last_used: None if the key was not used."""
    return asdict(usage) | {"last_used": usage.last_used or None}
