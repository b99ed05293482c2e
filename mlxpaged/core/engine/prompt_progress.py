"""How far requests are before their first token, as the event loop knows it from the steps' reports."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

from mlxpaged.core.engine.request import Request
from mlxpaged.core.scheduling.sequence import AGING_RATE, Sequence
from mlxpaged.core.step import Row

Place = tuple[float, int]


class PromptChunk(NamedTuple):
    """A step has computed a chunk of a prompt, but not the last one. computed_tokens: of the prompt so far, the cached
    ones included."""

    request_id: str
    computed_tokens: int
    cached_tokens: int


def prompt_chunks(rows: ListOf[Row], sequences: Mapping[int, Sequence]) -> tuple[PromptChunk, ...]:
    """Returns what a step has computed of the prompts that are not complete after it. sequences: by id, those that have
    not ended."""
    running = ((row, sequences[row.sequence_id]) for row in rows if not row.samples and row.sequence_id in sequences)
    return tuple(
        PromptChunk(each.request_id, min(row.context_len, each.num_prompt_tokens), each.num_cached_tokens)
        for row, each in running
        if not each.ends_after(row)
    )


@dataclass(frozen=True)
class PromptProgress:
    """How far a request is. All counts but the first one are tokens.

    waiting_before: how many requests are served before it; None if a step has computed a part of it. computed: of the
    prompt, the cached ones included. output: of the answer.
    """

    waiting_before: int | None
    prompt: int
    cached: int
    computed: int
    output: int
    seconds: float  # since its arrival


class WaitingLine:
    """The requests of which no step has computed a part, in the order in which they are served. Deadlines can change
    that order, but not this one."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._numbers = itertools.count()

    def enter(self, request: Request) -> Place:
        place = (request.priority + AGING_RATE * request.arrival_time, next(self._numbers))
        bisect.insort(self._places, place)
        return place

    def leave(self, place: Place) -> None:
        del self._places[bisect.bisect_left(self._places, place)]

    def before(self, place: Place) -> int:
        return bisect.bisect_left(self._places, place)
