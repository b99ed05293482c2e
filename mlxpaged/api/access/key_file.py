"""Makes and checks API keys, and reads and writes the file that holds them. `mlxpaged keys` edits this file.

A key is 256 random bits. The file holds a salted hash of each key. A fast hash is enough: slow hashes protect passwords
that people choose, but nothing can guess 256 random bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mlxpaged.api.access.key_names import NAME_PATTERN, TIERS, TierName
from mlxpaged.durable_files import owner_only, replacing

PREFIX = "sk-mlxpaged-"
"""Some clients require sk-; the name is for scanners that search for leaked keys."""
SECRET_BYTES = 32
SALT_BYTES = hashlib.blake2b.SALT_SIZE
DIGEST_BYTES = 32
MAX_KEYS = 1000
"""The key of each request is compared with all of them, which takes about a microsecond per key."""

PerMinute = Annotated[int, Field(ge=1, le=10**9)]


class KeyFileError(Exception):
    """The file of keys cannot be used."""


class KeyEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    salt: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$", repr=False)]
    hash: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$", repr=False)]
    tier: TierName = "normal"  # priority of its requests
    max_priority: TierName | None = None  # highest priority that they may ask for; None: the tier
    admin: bool = False  # may see and end the requests of all keys
    metrics: bool = False  # may read /metrics, which shows the load that all keys make
    requests_per_minute: PerMinute | None = None  # None: no limit
    tokens_per_minute: PerMinute | None = None
    models: tuple[str, ...] | None = None  # names of the models that it may use; None: all
    created: str | None = None

    @model_validator(mode="after")
    def _a_tier_may_ask_for_itself(self) -> KeyEntry:
        if self.max_priority is not None and TIERS.index(self.max_priority) > TIERS.index(self.tier):
            raise ValueError(f"max_priority {self.max_priority} must not be lower than tier {self.tier}")
        return self

    def matches(self, presented: str) -> bool:
        return hmac.compare_digest(digest(presented, bytes.fromhex(self.salt)), bytes.fromhex(self.hash))


class KeyFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keys: Annotated[tuple[KeyEntry, ...], Field(max_length=MAX_KEYS)] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> KeyFile:
        names = [key.name for key in self.keys]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two keys are named {name}")
        return self


def digest(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), salt=salt, digest_size=DIGEST_BYTES).digest()


def make_key() -> tuple[str, str, str]:
    """Returns a new key, its salt and its hash."""
    key, salt = PREFIX + secrets.token_hex(SECRET_BYTES), secrets.token_bytes(SALT_BYTES)
    return key, salt.hex(), digest(key, salt).hex()


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def read(path: Path) -> tuple[KeyFile, os.stat_result]:
    """Returns the keys, and the state of the file. Raises KeyFileError."""
    try:
        with open(path, "rb") as file:
            state, content = os.fstat(file.fileno()), file.read()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    try:
        return KeyFile.model_validate_json(content), state
    except ValidationError as error:
        raise unusable(path, error) from None


def unusable(path: Path, error: ValidationError) -> KeyFileError:
    """The message does not quote the file, which may contain a key by mistake."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return KeyFileError(f"{path}: {f'{place}: ' if place else ''}{message}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock while the file is read, changed and written. Without it, two commands at once could lose a change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w", opener=owner_only) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, content: KeyFile) -> None:
    """The file is readable by its owner only."""
    with replacing(path) as file:
        file.write(json.dumps(content.model_dump(exclude_none=True), indent=2).encode() + b"\n")
