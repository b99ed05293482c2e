"""What a caller may ask for. The one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.engine import EngineConfig, Priority


@dataclass(frozen=True)
class Tier:
    """default: the priority of a request that asks for none. highest: the best that one may ask for."""

    default: Priority
    highest: Priority


def tier_of(_request: Request, config: EngineConfig) -> Tier:
    """The caller's. There are no API keys yet, so all have the same, and nobody may ask for more than the default."""
    return Tier(default=config.default_priority, highest=config.default_priority)
