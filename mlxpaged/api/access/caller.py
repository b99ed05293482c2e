"""The caller is the owner of the API key that a request carries."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.key_usage import Meter
from mlxpaged.api.access.rate_limit import Allowance
from mlxpaged.core.scheduling.sequence import Priority

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
"""The last one is 127.0.0.1 for a server that listens on `::`."""


@dataclass(frozen=True)
class Caller:
    name: str  # of the key
    default: Priority  # priority of its requests
    highest: Priority  # highest priority that its requests may ask for
    admin: bool  # may see and end the requests of all keys
    metrics: bool  # may read /metrics, as an admin may
    allowance: Allowance  # what is left of its limits
    meter: Meter  # what it has used
    models: frozenset[str] | None = None  # names of the models that it may use; None: all

    def count(self, requests: int = 0, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        """Count tokens against its limit, and as used. cached: those of the prompt that the prefix cache had."""
        self.allowance.take("tokens", prompt + output)
        self.meter.count(requests, prompt, cached, output)


def caller_of(request: Request) -> Caller | None:
    """Returns None on a server without keys. Every request may do everything there."""
    caller: Caller | None = request.state.caller
    return caller


def is_local(request: Request) -> bool:
    """Whether the request comes from this machine. A proxy on it makes all requests local."""
    return request.client is not None and request.client.host in LOOPBACK


def owner_of(request: Request) -> str | None:
    """Returns the owner of the files, batches and responses that the request creates."""
    caller = caller_of(request)
    return None if caller is None else caller.name


def allows(caller: Caller | None, model: str) -> bool:
    """Whether the caller may use the model of this name."""
    return caller is None or caller.models is None or model in caller.models


def may_use(request: Request, owner: str | None) -> bool:
    """Whether the caller may see and end what belongs to the key of this name."""
    return sees_all(request) or owner_of(request) == owner


def sees_all(request: Request) -> bool:
    """Whether the caller may see and end what belongs to any key."""
    caller = caller_of(request)
    return caller is None or caller.admin
