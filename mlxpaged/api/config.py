"""What the HTTP side is started with, apart from the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HttpConfig:
    """api_keys: the file of keys, None where nobody needs one. allowed_hosts, cors_origins: names of this server, and
    pages that may use it, see `access.guards.Origins`. max_connections: requests answered at once."""

    api_keys: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 1024 * 1024  # over four million tokens of English: no model's context is longer
    max_connections: int = 1024
