"""The priorities that a caller may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of
from mlxpaged.engine import EngineConfig, Priority


@dataclass(frozen=True)
class Tier:
    default: Priority  # of a request that asks for none
    highest: Priority  # that a request may ask for


def tier_of(request: Request, config: EngineConfig) -> Tier:
    """The tier of the caller's key. On a server without keys no request may ask for more than the default."""
    caller = caller_of(request)
    if caller is None:
        return Tier(default=config.default_priority, highest=config.default_priority)
    return Tier(caller.default, caller.highest)
