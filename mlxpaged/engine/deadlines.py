"""When requests must have come how far."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from mlxpaged.engine.request import Request
from mlxpaged.scheduler import Sequence


class Deadline(NamedTuple):
    """At `time`, on the engine's clock, a sequence has had `limit` seconds: for its answer, or for its first token."""

    time: float
    sequence_id: int
    limit: float
    of_first_token: bool

    def message(self, sequence: Sequence, now: float) -> str:
        """How far the sequence has come, for its client."""
        name = "ttft_timeout" if self.of_first_token else "timeout"
        prompt = computed = sequence.num_prompt_tokens
        if sequence.num_output_tokens == 0:  # else its prompt was computed, be its blocks lost since then
            computed = min(prompt, max(sequence.num_computed_tokens, sequence.num_swapped_tokens))
        return (
            f"{name} of {self.limit:g} s passed: after {now - sequence.arrival_time:.3f} s the request was "
            f"{sequence.status.value}, with {computed} of {prompt} prompt tokens computed and "
            f"{sequence.num_output_tokens} tokens generated"
        )


class Deadlines:
    """A heap: as long as the earliest deadline is ahead, a step looks at nothing else.

    Deadlines of sequences that have ended stay in it until their time comes, or until most are such.
    """

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._unfinished: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, sequence_id: int, request: Request) -> None:
        for limit, of_first_token in ((request.ttft_timeout, True), (request.timeout, False)):
            if limit is not None:
                heapq.heappush(self._heap, Deadline(request.arrival_time + limit, sequence_id, limit, of_first_token))
                self._unfinished.add(sequence_id)

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._unfinished.discard(sequence_id)
        if len(self._heap) > 4 * len(self._unfinished) + 64:  # a sequence has at most two
            self._heap = [deadline for deadline in self._heap if deadline.sequence_id in self._unfinished]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> Iterator[Deadline]:
        """Of unfinished sequences, the earliest first. They may be forgotten while this is iterated over."""
        while self._heap and self._heap[0].time <= now:
            deadline = heapq.heappop(self._heap)
            if deadline.sequence_id in self._unfinished:
                yield deadline
