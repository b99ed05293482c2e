"""Configures the HTTP side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HttpConfig:
    api_keys: Path | None = None  # file of API keys; None: requests need no key
    allowed_hosts: tuple[str, ...] = ()  # names of this server, beside the local ones; see `Origins`
    allow_downloads: bool = False  # whether POST /api/pull downloads models
    image_hosts: tuple[str, ...] = ()  # hosts that images are fetched from; see `ImageHosts`
    cors_origins: tuple[str, ...] = ()  # origins whose pages may use it, beside the local ones
    max_body_bytes: int = 32 * 2**20  # as Anthropic's; seven screenshots of 3 MB in base64
    ollama_port: int | None = None  # the port that answers as Ollama at /, beside the main one; None: there is none
    isolate_prefix_cache: bool = False  # whether no two keys share prefixes; otherwise keys of one tier do
    strict: bool = False  # refuse fields that would be ignored
    max_connections: int = 1024  # requests that are answered at once, streams included
    max_open_connections: float = math.inf  # idle ones included; what the limit of open files allows
    write_timeout: float | None = 60.0  # seconds after which a client that reads nothing is left; None: no limit
    keep_alive_seconds: float = 10.0  # a stream that was silent for so long says how far its request is
