"""Deadlines of requests: finds those that have passed, and those that can no longer be met."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import NamedTuple

from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence

CLEAR_FACTOR = 2.0
"""A request is ended early if its prefill is estimated to take more than this many times the time left."""

SHORTEST_WAIT = 0.05
"""Seconds. A deadline that is closer than this is not checked again before it passes."""


class Check(NamedTuple):
    """When to check a deadline of a sequence, in seconds on the engine's clock."""

    time: float
    sequence_id: int
    of_first_token: bool


def set_deadlines(sequence: Sequence, request: Request) -> None:
    """Set a sequence's deadlines. Within a class, the scheduler serves the earliest deadline first."""
    sequence.ttft_deadline = request.arrival_time + (math.inf if request.ttft_timeout is None else request.ttft_timeout)
    sequence.deadline = request.arrival_time + (math.inf if request.timeout is None else request.timeout)


class Deadlines:
    """A heap by the time of the next check, so that most steps look only at its first entry.

    A deadline is checked when its request arrives, each time half of the remaining time has passed, and at its end.
    Entries of finished sequences stay in the heap until their time comes, or until they are most of the heap.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._heap: list[Check] = []
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_check(self) -> float:
        """When `missed` has something to do; inf if never."""
        return self._heap[0].time if self._heap else math.inf

    def watch(self, sequence: Sequence) -> None:
        for deadline, of_first_token in ((sequence.ttft_deadline, True), (sequence.deadline, False)):
            if deadline < math.inf:
                heapq.heappush(self._heap, Check(sequence.arrival_time, sequence.sequence_id, of_first_token))
                self._sequences[sequence.sequence_id] = sequence

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._sequences.pop(sequence_id, None)
        if len(self._heap) > 4 * len(self._sequences) + 64:  # a sequence has at most two
            self._heap = [check for check in self._heap if check.sequence_id in self._sequences]
            heapq.heapify(self._heap)

    def missed(self, now: float) -> Iterator[tuple[int, str]]:
        """Ids of the sequences to end, with the reason. The caller may call `forget` while it iterates."""
        while self._heap and self._heap[0].time <= now:
            check = heapq.heappop(self._heap)
            sequence = self._sequences.get(check.sequence_id)
            if sequence is None or (check.of_first_token and sequence.num_output_tokens > 0):
                continue
            name, deadline = "timeout", sequence.deadline
            if check.of_first_token:
                name, deadline = "ttft_timeout", sequence.ttft_deadline
            limit = round(deadline - sequence.arrival_time, 9)  # the client's number, without rounding errors
            label, left = f"{name} of {limit:g} s", deadline - now
            if left <= 0:
                yield sequence.sequence_id, f"{label} passed: {progress(sequence, now)}"
            elif prefill := self._scheduler.prefill_beyond(sequence, CLEAR_FACTOR * left):
                kind = "tokens" if sequence.num_output_tokens else "prompt tokens"
                yield (
                    sequence.sequence_id,
                    f"{label} cannot be met: the remaining {prefill.num_tokens} {kind} take about "
                    f"{prefill.seconds:.1f} s on this machine",
                )
            else:
                time = now + left / 2 if left > SHORTEST_WAIT else deadline
                heapq.heappush(self._heap, check._replace(time=time))


def progress(sequence: Sequence, now: float) -> str:
    """How far a sequence has come, in a message for its client."""
    prompt = computed = sequence.num_prompt_tokens
    if sequence.num_output_tokens == 0:  # otherwise its prompt was computed, even if its blocks are lost now
        computed = min(prompt, max(sequence.num_computed_tokens, sequence.kv.num_swapped_tokens))
    return (
        f"after {now - sequence.arrival_time:.3f} s the request was {sequence.status.value}, with {computed} of "
        f"{prompt} prompt tokens computed and {sequence.num_output_tokens} tokens generated"
    )


def end_if_late(request: Request, num_tokens: int, now: float) -> RequestOutput | None:
    """The last output of a request that no engine has now, if one of its deadlines has passed. num_tokens: of its
    answer so far."""
    passed = now - request.arrival_time
    limits = {"timeout": request.timeout, "ttft_timeout": None if num_tokens else request.ttft_timeout}
    for name, limit in limits.items():
        if limit is not None and passed >= limit:
            done = f"the request waited for its model, with {num_tokens} tokens generated"
            error = f"{name} of {limit:g} s passed: after {passed:.3f} s {done}"
            reason = FinishReason.TIMEOUT
            return RequestOutput(
                request.request_id, now, num_output_tokens=num_tokens, finish_reason=reason, error=error
            )
    return None
