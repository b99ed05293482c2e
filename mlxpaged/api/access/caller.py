"""The caller: the owner of the API key that a request carries."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.rate_limit import Allowance
from mlxpaged.engine import Priority


@dataclass(frozen=True)
class Caller:
    name: str  # of the key
    default: Priority  # of its requests
    highest: Priority  # that its requests may ask for
    admin: bool  # may see and end the requests of all keys
    allowance: Allowance  # what is left of its limits

    def may_use(self, owner: str | None) -> bool:
        """Whether the caller may see and end what belongs to the key of this name."""
        return self.admin or self.name == owner


def caller_of(request: Request) -> Caller | None:
    """None on a server without keys, where every request may do everything."""
    caller: Caller | None = request.state.caller
    return caller


def owner_of(request: Request) -> str | None:
    """The owner of a file, batch or response that the request creates."""
    caller = caller_of(request)
    return None if caller is None else caller.name


def may_use(request: Request, owner: str | None) -> bool:
    """Whether the caller may see a file, batch or response of this owner."""
    caller = caller_of(request)
    return caller is None or caller.may_use(owner)
