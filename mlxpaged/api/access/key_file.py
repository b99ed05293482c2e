"""The file of API keys, and how a key is made and known again.

JSON, because Python 3.10's library reads and writes it; the `mlxpaged keys` command edits it. A key is 256 random bits,
of which the file has a salted hash. One round of a fast hash is enough: slow ones make it expensive to guess what
people choose, and there is nothing to guess among 2**256.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

PREFIX = "sk-mlxpaged-"
"""Clients that check keys want sk-, and scanners for leaked ones a name."""
SECRET_BYTES = 32
SALT_BYTES = hashlib.blake2b.SALT_SIZE
DIGEST_BYTES = 32
MAX_KEYS = 1000
"""All are compared with at every request, about a microsecond each."""

TierName = Literal["high", "normal", "low"]
PerMinute = Annotated[int, Field(ge=1, le=10**9)]
TIERS: tuple[TierName, ...] = ("high", "normal", "low")
NAME_PATTERN = "^[A-Za-z0-9._-]{1,64}$"

SECRET = re.compile(r"\bsk-[A-Za-z0-9_-]{8,}")


def redacted(text: str) -> str:
    """`text` without what looks like a key, this server's or another's that was sent here by mistake."""
    return SECRET.sub("sk-***", text)


class KeyFileError(Exception):
    """The file of keys cannot be used."""


class KeyEntry(BaseModel):
    """One key. tier: the priority of its requests. max_priority: the highest that they may ask for, by default the
    tier. admin: may see and end everybody's requests. requests_per_minute, tokens_per_minute: None for any number."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    salt: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$", repr=False)]
    hash: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$", repr=False)]
    tier: TierName = "normal"
    max_priority: TierName | None = None
    admin: bool = False
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    created: str | None = None

    @model_validator(mode="after")
    def _a_tier_may_ask_for_itself(self) -> KeyEntry:
        if self.max_priority is not None and TIERS.index(self.max_priority) > TIERS.index(self.tier):
            raise ValueError(f"max_priority {self.max_priority} is below the tier, {self.tier}")
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
    """A new key, and the salt and the hash to know it by."""
    key, salt = PREFIX + secrets.token_hex(SECRET_BYTES), secrets.token_bytes(SALT_BYTES)
    return key, salt.hex(), digest(key, salt).hex()


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def read(path: Path) -> tuple[KeyFile, os.stat_result]:
    """The keys, and the state of the file that they were read from. Raises KeyFileError."""
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
    """Without the input: somebody may have put the key itself into the file."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return KeyFileError(f"{path}: {f'{place}: ' if place else ''}{message}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """While the file is read, changed and written: of two commands at once, neither undoes what the other did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, content: KeyFile) -> None:
    """Whole or not at all, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            json.dump(content.model_dump(exclude_none=True), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
