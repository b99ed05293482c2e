"""Deadlines of requests: which have passed, and which can no longer be met."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from mlxpaged.engine.request import Request
from mlxpaged.scheduler import Scheduler, Sequence

CLEAR_FACTOR = 2.0
"""A request is ended early if the estimated time of its prefill is more than this many times the time left."""

SHORTEST_WAIT = 0.05
"""Seconds. A deadline that is closer is not examined again before it passes."""


class Deadline(NamedTuple):
    """A deadline at `time`, on the engine's clock, to be examined at `next_check`."""

    next_check: float
    time: float
    sequence_id: int
    limit: float  # seconds from arrival
    of_first_token: bool

    @property
    def label(self) -> str:
        return f"{'ttft_timeout' if self.of_first_token else 'timeout'} of {self.limit:g} s"


def set_deadlines(sequence: Sequence, request: Request) -> None:
    """For the scheduler, which serves the earliest deadline of a class first."""
    sequence.ttft_deadline = request.arrival_time + (math.inf if request.ttft_timeout is None else request.ttft_timeout)
    sequence.deadline = request.arrival_time + (math.inf if request.timeout is None else request.timeout)


class Deadlines:
    """A heap by the time of the next check, so that most steps look at its first entry only.

    A deadline is checked when its request arrives, whenever half of the remaining time has passed, and at its end.
    Entries of finished sequences stay in the heap until their time comes, or until most entries are such.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._heap: list[Deadline] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, sequence: Sequence, request: Request) -> None:
        for limit, of_first_token in ((request.ttft_timeout, True), (request.timeout, False)):
            if limit is not None:
                time, sequence_id = request.arrival_time + limit, sequence.sequence_id
                heapq.heappush(self._heap, Deadline(request.arrival_time, time, sequence_id, limit, of_first_token))
                self._sequences[sequence_id] = sequence

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._sequences.pop(sequence_id, None)
        if len(self._heap) > 4 * len(self._sequences) + 64:  # a sequence has at most two
            self._heap = [deadline for deadline in self._heap if deadline.sequence_id in self._sequences]
            heapq.heapify(self._heap)

    def missed(self, now: float) -> Iterator[tuple[int, str]]:
        """Ids of the sequences to end, with the reason. They may be forgotten while this is iterated over."""
        while self._heap and self._heap[0].next_check <= now:
            deadline = heapq.heappop(self._heap)
            sequence = self._sequences.get(deadline.sequence_id)
            if sequence is None or (deadline.of_first_token and sequence.num_output_tokens > 0):
                continue
            if deadline.time <= now:
                yield sequence.sequence_id, passed_message(deadline, sequence, now)
                continue
            left = deadline.time - now
            prefill = self._scheduler.prefill_beyond(sequence, CLEAR_FACTOR * left)
            if prefill is not None:
                kind = "tokens" if sequence.num_output_tokens else "prompt tokens"
                yield (
                    sequence.sequence_id,
                    f"{deadline.label} cannot be met: the remaining {prefill.num_tokens} {kind} take about "
                    f"{prefill.seconds:.1f} s on this machine",
                )
                continue
            next_check = now + left / 2 if left > SHORTEST_WAIT else deadline.time
            heapq.heappush(self._heap, deadline._replace(next_check=next_check))


def passed_message(deadline: Deadline, sequence: Sequence, now: float) -> str:
    """How far the sequence has come, for its client."""
    prompt = computed = sequence.num_prompt_tokens
    if sequence.num_output_tokens == 0:  # otherwise its prompt was computed, even if its blocks are lost now
        computed = min(prompt, max(sequence.num_computed_tokens, sequence.num_swapped_tokens))
    return (
        f"{deadline.label} passed: after {now - sequence.arrival_time:.3f} s the request was "
        f"{sequence.status.value}, with {computed} of {prompt} prompt tokens computed and "
        f"{sequence.num_output_tokens} tokens generated"
    )
