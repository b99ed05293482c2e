"""What a caller may ask for. The one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of
from mlxpaged.engine import EngineConfig, Priority


@dataclass(frozen=True)
class Tier:
    """default: the priority of a request that asks for none. highest: the best that one may ask for."""

    default: Priority
    highest: Priority


def tier_of(request: Request, config: EngineConfig) -> Tier:
    """That of the caller's key. Without keys all have the same, and nobody may ask for more than the default."""
    caller = caller_of(request)
    if caller is None:
        return Tier(default=config.default_priority, highest=config.default_priority)
    return Tier(caller.default, caller.highest)
