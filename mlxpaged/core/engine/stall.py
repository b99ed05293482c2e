"""What the engine thread does, in words: for the case that it does not end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Work(str, Enum):
    STEP = "step"
    EMBEDDINGS = "embedding step"
    COMMANDS = "commands"  # of requests, between two steps
    LOAD = "load"  # from one report of its progress to the next


class StepSize(NamedTuple):
    """seconds: how long the step should take; None if that is not known. request_ids: those that it computes."""

    rows: int
    tokens: int
    seconds: float | None
    request_ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stall:
    """Work that has not ended in time. limit: seconds. size: of a step. since: on the engine's clock."""

    work: Work
    model: str | None
    size: StepSize | None
    since: float
    limit: float

    def __str__(self) -> str:
        """The same at any time, so that equal errors have equal messages."""
        of_model = "" if self.model is None else f" of {self.model!r}"
        size = "" if self.size is None else f" with {self.size.rows} rows and {self.size.tokens} tokens"
        return f"the engine is stalled: a {self.work.value}{of_model}{size} has not ended within {self.limit:.0f} s"

    def fields(self, now: float) -> dict[str, object]:
        """What /health says of it."""
        return {
            "model": self.model,
            "work": self.work.value,
            "rows": None if self.size is None else self.size.rows,
            "tokens": None if self.size is None else self.size.tokens,
            "seconds": round(now - self.since, 1),
            "limit_seconds": round(self.limit, 1),
        }
