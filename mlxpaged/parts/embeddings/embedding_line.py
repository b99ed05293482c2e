"""Lines in which the inputs of embedding requests wait. In each, clients take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.parts.embeddings.embedding_passes import Input, Vectors


@dataclass(frozen=True)
class EmbeddingOutput:
    vectors: Vectors | None  # [inputs, dimensions], float32; None if the request failed
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    request_id: str
    inputs: Sequence[Sequence[int]]  # token ids, at least one per input
    dimensions: int  # the vectors are cut to this length
    seconds: Sequence[int] = ()  # where the second text of each input begins, if they are pairs
    client: str = ""  # clients take turns
    reply: Future[EmbeddingOutput] = field(default_factory=Future)  # cancelled if the client has left


class Job:
    """A request that is not complete. num_left: inputs that are not done."""

    def __init__(self, request: EmbeddingRequest) -> None:
        self.request = request
        self.vectors: Vectors = np.zeros((len(request.inputs), request.dimensions), np.float32)
        self.num_left = len(request.inputs)

    def row(self, index: int) -> Row:
        tokens, seconds = self.request.inputs[index], self.request.seconds
        return Row(tokens, seconds[index] if seconds else len(tokens), job=self, index=index)


@dataclass
class Row(Input):
    """One input of a job."""

    job: Job = field(kw_only=True)
    index: int = field(kw_only=True)


@dataclass
class Waiting:
    """Inputs of a job that are not started, the longest first."""

    job: Job
    indices: deque[int]


class Line:
    """Inputs of more than `shorter` tokens, and at most `longest`. Clients take turns, and so do the jobs of a client.
    held: an input that is computed in parts, and has begun."""

    def __init__(self, shorter: int, longest: int) -> None:
        self._shorter, self._longest = shorter, longest
        self._waiting: dict[str, deque[Waiting]] = {}  # by client; the first one is next
        self._had_turn: Waiting | None = None  # the last one
        self.held: Row | None = None

    @property
    def has_work(self) -> bool:
        return self.held is not None or any(self._in_turn())

    def add(self, job: Job) -> None:
        """Those of its inputs that belong here."""
        lengths = [len(each) for each in job.request.inputs]
        own = [index for index, length in enumerate(lengths) if self._shorter < length <= self._longest]
        if own:
            waiting = Waiting(job, deque(sorted(own, key=lambda index: lengths[index], reverse=True)))
            self._waiting.setdefault(job.request.client, deque()).append(waiting)

    def remove(self, job: Job) -> None:
        """Its inputs, if there are any."""
        if self.held is not None and self.held.job is job:
            self.held = None
        for waiting in self._waiting.get(job.request.client, ()):
            if waiting.job is job:
                waiting.indices.clear()

    def take_one(self) -> Row:
        """The next input."""
        waiting = self._next_turn()
        return waiting.job.row(waiting.indices.pop())

    def take(self, fits: Callable[[Sequence[int]], bool]) -> list[Row]:
        """The next inputs, perhaps of several jobs. fits: whether inputs of these lengths go into one pass; one always
        does. The turn is that of the first one: the others use what it leaves."""
        rows: list[Row] = []
        lengths: list[int] = []
        self._next_turn()
        for waiting in self._in_turn():
            while waiting.indices:
                lengths.append(len(waiting.job.request.inputs[waiting.indices[0]]))
                if rows and not fits(lengths):
                    lengths.pop()
                    break
                rows.append(waiting.job.row(waiting.indices.popleft()))
        return rows

    def _in_turn(self) -> Iterator[Waiting]:
        for jobs in self._waiting.values():
            yield from (each for each in jobs if each.indices)

    def _next_turn(self) -> Waiting:
        """The turn of the last one ends now: a client that has come meanwhile is before it."""
        if self._had_turn is not None:
            client = self._had_turn.job.request.client
            jobs = self._waiting.pop(client)
            jobs.remove(self._had_turn)
            jobs.append(self._had_turn)
            self._waiting[client] = jobs
        kept = {client: deque(each for each in jobs if each.indices) for client, jobs in self._waiting.items()}
        self._waiting = {client: jobs for client, jobs in kept.items() if jobs}
        self._had_turn = next(self._in_turn())
        return self._had_turn
