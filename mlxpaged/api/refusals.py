"""What the server remembers of a request that it refused."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REFUSALS = 50


@dataclass(frozen=True)
class Refusal:
    """What the log has of a refused request: no text of the client's beyond the path and the names of fields."""

    time: float  # Unix time
    request_id: str
    method: str
    path: str
    status: int
    param: str | None
    code: str
    reason: str
