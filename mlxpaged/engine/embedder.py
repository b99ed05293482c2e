"""Embeddings on the engine thread: a queue of requests, and one bounded forward pass at a time between other steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxpaged.engine.request import EndedRequest
from mlxpaged.models import EmbeddingModel, synchronize
from mlxpaged.scheduler import FinishReason, SequenceStatus

logger = logging.getLogger(__name__)

STEP_TOKENS = 256
"""Of embeddings between two steps of requests that generate, padding included: what these lose is about the time of a
prompt's chunk of that size. Longer inputs are computed alone, in chunks; shorter ones together."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbeddingOutput:
    """vectors: [inputs, dimensions], float32; None where the request ended without them."""

    vectors: Vectors | None
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None


@dataclass(frozen=True)
class EmbeddingRequest:
    """inputs: tokens, each input at least one. dimensions: what the vectors are cut to. reply: cancelled by whoever
    does not wait for it any longer."""

    request_id: str
    inputs: Sequence[Sequence[int]]
    dimensions: int
    reply: Future[EmbeddingOutput] = field(default_factory=Future)


@dataclass(frozen=True)
class EmbedderStats:
    """waiting: inputs that are not done. Counters (`total`) only grow."""

    waiting: int = 0
    requests_total: int = 0
    tokens_total: int = 0
    steps_total: int = 0


NO_EMBEDDINGS = EmbedderStats()


class Job:
    """A request under way. short, long: the numbers of its inputs that were not begun, the longest first; those that
    run together are then of about one length."""

    def __init__(self, request: EmbeddingRequest, step_tokens: int) -> None:
        self.request = request
        self.vectors: Vectors = np.zeros((len(request.inputs), request.dimensions), np.float32)
        self.num_left = len(request.inputs)
        order = sorted(range(len(request.inputs)), key=lambda i: len(request.inputs[i]), reverse=True)
        self.long = [i for i in order if len(request.inputs[i]) > step_tokens]
        self.short = order[len(self.long) :]


@dataclass(frozen=True)
class Row:
    """One input of a job."""

    job: Job
    index: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.job.request.inputs[self.index]


class LongRow:
    """An input that is computed in chunks, with what they leave behind."""

    def __init__(self, row: Row, cache: list[Any]) -> None:
        self.row = row
        self.cache = cache
        self.num_computed = 0
        self.pooled: mx.array | None = None


class Embedder:
    """Requests take turns, input by input. An idle one costs nothing; at most one long input holds keys and values."""

    def __init__(self, model: EmbeddingModel, max_step_tokens: int) -> None:
        """max_step_tokens: in one step while nobody generates."""
        self.model = model
        self._max_step_tokens = max_step_tokens
        self._step_tokens = min(STEP_TOKENS, max_step_tokens)
        self._jobs: deque[Job] = deque()
        self._long: LongRow | None = None
        self._long_is_next = False
        self._requests = self._tokens = self._steps = 0

    def add(self, request: EmbeddingRequest) -> None:
        self._jobs.append(Job(request, self._step_tokens))

    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> EmbedderStats:
        return EmbedderStats(sum(job.num_left for job in self._jobs), self._requests, self._tokens, self._steps)

    def cancel(self, request_ids: Sequence[str]) -> list[EndedRequest]:
        """End requests on somebody's word; unknown ids are passed over."""
        ended = [job for job in self._jobs if job.request.request_id in request_ids]
        for job in ended:
            self._end(job, EmbeddingOutput(None, FinishReason.CANCELLED, "the request was cancelled"))
        return [EndedRequest(job.request.request_id, SequenceStatus.RUNNING, 0) for job in ended]

    def abort_all(self, error: str) -> None:
        for job in list(self._jobs):
            self._end(job, EmbeddingOutput(None, FinishReason.ERROR, error))

    def step(self, alone: bool) -> None:
        """One forward pass. alone: nobody generates and waits for it."""
        for job in [job for job in self._jobs if job.request.reply.cancelled()]:
            self._drop(job)
        if self._long is None:
            self._begin_long()
        has_short = any(job.short for job in self._jobs)
        budget = self._max_step_tokens if alone else self._step_tokens
        if self._long is not None and (self._long_is_next or not has_short):
            self._long_is_next = False
            self._run_chunk(self._long, budget)
        elif has_short:
            self._long_is_next = True
            self._run_together(self._next_rows(budget))

    def _begin_long(self) -> None:
        for job in self._jobs:
            if job.long:
                self._long = LongRow(Row(job, job.long.pop()), self.model.make_cache())
                self._let_others_go_first(job)
                return

    def _next_rows(self, budget: int) -> list[Row]:
        """Of as many jobs as it takes; padded to the longest they are no more than `budget` tokens."""
        rows: list[Row] = []
        longest = 0
        for job in self._jobs:
            while job.short:
                length = len(job.request.inputs[job.short[0]])
                if (len(rows) + 1) * max(longest, length) > budget:
                    break
                longest = max(longest, length)
                rows.append(Row(job, job.short.pop(0)))
        self._let_others_go_first(rows[0].job)
        return rows

    def _let_others_go_first(self, job: Job) -> None:
        self._jobs.remove(job)
        self._jobs.append(job)

    def _run_together(self, rows: Sequence[Row]) -> None:
        """Rows of several requests that fail together are run again apart: only the one that is to blame ends."""
        lengths = [len(row.tokens) for row in rows]
        tokens = [[*row.tokens, *[0] * (max(lengths) - len(row.tokens))] for row in rows]
        try:
            # What stands behind an input is padding: a causal decoder's states before it do not know of it.
            pooled = self._pool(self.model.decode(mx.array(tokens), None), 0, mx.array(lengths))
            mx.eval(pooled)  # an error in an evaluation that NumPy asks for would end the process
            vectors = np.array(pooled)
        except Exception as error:
            logger.exception("embedding %d inputs failed", len(rows))
            synchronize()
            jobs = {row.job for row in rows}
            if len(jobs) == 1:
                self._fail(rows[0].job, error)
            else:
                for job in jobs:
                    self._run_together([row for row in rows if row.job is job])
            return
        self._count(sum(lengths))
        for row, vector in zip(rows, vectors, strict=True):
            self._finish(row, vector)

    def _run_chunk(self, long: LongRow, budget: int) -> None:
        start, total = long.num_computed, len(long.row.tokens)
        chunk = long.row.tokens[start : start + budget]
        try:
            pooled = self._pool(self.model.decode(mx.array([chunk]), long.cache), start, mx.array([total]))
            long.pooled = pooled if long.pooled is None else long.pooled + pooled
            mx.eval(long.pooled)
        except Exception as error:
            logger.exception("embedding an input of %d tokens failed", total)
            synchronize()
            self._fail(long.row.job, error)
            return
        long.num_computed += len(chunk)
        self._count(len(chunk))
        if long.num_computed == total:
            self._long = None
            self._finish(long.row, np.array(long.pooled)[0])

    def _pool(self, states: mx.array, start: int, lengths: mx.array) -> mx.array:
        """What states [B, T, D] from position `start` on add to the vectors [B, D] of inputs of these lengths."""
        positions = mx.arange(start, start + states.shape[1])
        weights = self.model.spec.pooling.weights(positions[None], lengths[:, None])
        return (states.astype(mx.float32) * weights[..., None]).sum(axis=1)

    def _count(self, num_tokens: int) -> None:
        self._steps += 1
        self._tokens += num_tokens

    def _finish(self, row: Row, pooled: Vectors) -> None:
        job = row.job
        vector = pooled[: job.request.dimensions]
        if self.model.spec.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)  # as torch's normalize has it
        job.vectors[row.index] = vector
        job.num_left -= 1
        if job.num_left > 0:
            return
        self._requests += 1
        if np.isfinite(job.vectors).all():
            self._end(job, EmbeddingOutput(job.vectors))
        else:
            self._end(job, EmbeddingOutput(None, FinishReason.ERROR, "an embedding is not finite"))

    def _fail(self, job: Job, error: Exception) -> None:
        message = f"the embeddings failed: {type(error).__name__}: {error}"
        self._end(job, EmbeddingOutput(None, FinishReason.ERROR, message))

    def _end(self, job: Job, output: EmbeddingOutput) -> None:
        self._drop(job)
        if job.request.reply.set_running_or_notify_cancel():  # False where nobody waits for it any more
            job.request.reply.set_result(output)

    def _drop(self, job: Job) -> None:
        self._jobs.remove(job)
        if self._long is not None and self._long.row.job is job:
            self._long = None
