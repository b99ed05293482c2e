"""Computes embeddings on the engine thread: queues requests, and runs one limited forward pass between other steps."""

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

from mlxpaged.cpu.streams import synchronize
from mlxpaged.engine.request import EndedRequest
from mlxpaged.engine.stall import StepSize
from mlxpaged.models.embedding import EmbeddingModel
from mlxpaged.process_memory import is_out_of_memory, require_memory
from mlxpaged.scheduler.sequence import FinishReason, SequenceStatus

logger = logging.getLogger(__name__)

STEP_TOKENS = 256
"""Tokens of a forward pass, padding included, while other requests generate. It delays them about as much as a prompt
chunk of this size. Longer inputs are computed alone, in chunks. Shorter inputs are computed together."""

Vectors = NDArray[np.float32]


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
    reply: Future[EmbeddingOutput] = field(default_factory=Future)  # cancelled if the client has left


@dataclass(frozen=True)
class EmbedderStats:
    """Counters (`total`) only increase."""

    waiting: int = 0  # inputs that are not done
    requests_total: int = 0
    tokens_total: int = 0
    steps_total: int = 0


NO_EMBEDDINGS = EmbedderStats()


class Job:
    """A request that is not complete. short, long: indices of inputs that are not started, the longest first."""

    def __init__(self, request: EmbeddingRequest, step_tokens: int) -> None:
        self.request = request
        self.vectors: Vectors = np.zeros((len(request.inputs), request.dimensions), np.float32)
        self.num_left = len(request.inputs)
        order = sorted(range(len(request.inputs)), key=lambda i: len(request.inputs[i]), reverse=True)
        self.long = [i for i in order if len(request.inputs[i]) > step_tokens]
        self.short = order[len(self.long) :]


@dataclass
class Row:
    """One input of a job. cache: None for an input that is computed in one pass. pooled[D]: of the tokens so far."""

    job: Job
    index: int
    cache: list[Any] | None = None
    num_computed: int = 0
    pooled: Vectors | None = None

    @property
    def tokens(self) -> Sequence[int]:
        return self.job.request.inputs[self.index]


class Embedder:
    """Runs inputs of all requests in turn. At most one long input holds keys and values."""

    def __init__(self, model: EmbeddingModel, max_step_tokens: int) -> None:
        """max_step_tokens: tokens of a forward pass while no request generates."""
        self.model = model
        self._max_step_tokens = max_step_tokens
        self._step_tokens = min(STEP_TOKENS, max_step_tokens)
        self._jobs: deque[Job] = deque()
        self._long: Row | None = None
        self._long_is_next = False
        self._requests = self._tokens = self._steps = 0
        self.step_size = StepSize(0, 0, None)  # of the latest forward pass

    def add(self, request: EmbeddingRequest) -> None:
        self._jobs.append(Job(request, self._step_tokens))

    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> EmbedderStats:
        return EmbedderStats(sum(job.num_left for job in self._jobs), self._requests, self._tokens, self._steps)

    def cancel(self, request_ids: Sequence[str]) -> list[EndedRequest]:
        """Unknown ids are ignored."""
        ended = [job for job in self._jobs if job.request.request_id in request_ids]
        for job in ended:
            self._end(job, EmbeddingOutput(None, FinishReason.CANCELLED, "the request was cancelled"))
        return [EndedRequest(job.request.request_id, SequenceStatus.RUNNING, 0) for job in ended]

    def abort_all(self, error: str) -> None:
        for job in list(self._jobs):
            self._end(job, EmbeddingOutput(None, FinishReason.ERROR, error))

    def step(self, alone: bool) -> None:
        """Run one forward pass. alone: whether no request generates."""
        for job in [job for job in self._jobs if job.request.reply.cancelled()]:
            self._drop(job)
        if self._long is None and (first := next((job for job in self._jobs if job.long), None)) is not None:
            self._long = Row(first, first.long.pop(), self.model.make_cache())
            self._move_to_the_end(first)
        has_short = any(job.short for job in self._jobs)
        budget = self._max_step_tokens if alone else self._step_tokens
        if self._long is not None and (self._long_is_next or not has_short):
            self._long_is_next = False
            self._run([self._long], budget)
        elif has_short:
            self._long_is_next = True
            self._run(self._next_rows(budget), budget)

    def _next_rows(self, budget: int) -> list[Row]:
        """Short inputs, perhaps of several jobs, that have at most `budget` tokens when padded to the longest one."""
        rows: list[Row] = []
        longest = 0
        for job in self._jobs:
            while job.short:
                length = len(job.request.inputs[job.short[0]])
                if (len(rows) + 1) * max(longest, length) > budget:
                    break
                longest = max(longest, length)
                rows.append(Row(job, job.short.pop(0)))
        self._move_to_the_end(rows[0].job)
        return rows

    def _move_to_the_end(self, job: Job) -> None:
        self._jobs.remove(job)
        self._jobs.append(job)

    def _run(self, rows: Sequence[Row], budget: int) -> None:
        """Compute short inputs, or the next chunk of a long one. If inputs of several requests fail together, each
        request runs again alone, so that only the faulty one ends."""
        start = rows[0].num_computed
        chunks = [row.tokens[start : start + budget] for row in rows]
        longest = max(map(len, chunks))
        self.step_size = StepSize(len(rows), longest * len(rows), None)
        # Padding follows the input, and a causal decoder's states do not depend on later tokens.
        tokens = [[*chunk, *[0] * (longest - len(chunk))] for chunk in chunks]
        try:
            require_memory(self.model.kv_bytes, "a step of embeddings")
            states = self.model.decode(mx.array(tokens), rows[0].cache)
            pooled = self._pool(states, start, mx.array([len(row.tokens) for row in rows]))
            mx.eval(pooled)  # if NumPy evaluated it, an error would end the process
            vectors = np.array(pooled)
        except Exception as error:
            logger.exception("embedding %d inputs failed", len(rows))
            synchronize()
            if is_out_of_memory(error):
                mx.clear_cache()
            jobs = {row.job for row in rows}
            for job in jobs if len(jobs) > 1 else ():
                self._run([row for row in rows if row.job is job], budget)
            if len(jobs) == 1:
                message = f"the embeddings failed: {type(error).__name__}: {error}"
                reason = FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
                self._end(rows[0].job, EmbeddingOutput(None, reason, message))
            return
        self._steps += 1
        self._tokens += sum(map(len, chunks))
        for row, chunk, vector in zip(rows, chunks, vectors, strict=True):
            row.pooled = vector if row.pooled is None else row.pooled + vector
            row.num_computed += len(chunk)
            if row.num_computed == len(row.tokens):
                self._finish(row, row.pooled)

    def _pool(self, states: mx.array, start: int, lengths: mx.array) -> mx.array:
        """Weighted sum [B, D] of states [B, T, D] from position `start` on, for inputs of these lengths."""
        positions = mx.arange(start, start + states.shape[1])
        weights = self.model.spec.pooling.weights(positions[None], lengths[:, None])
        return (states.astype(mx.float32) * weights[..., None]).sum(axis=1)

    def _finish(self, row: Row, pooled: Vectors) -> None:
        job = row.job
        if row is self._long:
            self._long = None
        vector = pooled[: job.request.dimensions]
        if self.model.spec.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)  # the limit is that of torch's normalize
        job.vectors[row.index] = vector
        job.num_left -= 1
        if job.num_left > 0:
            return
        self._requests += 1
        if np.isfinite(job.vectors).all():
            self._end(job, EmbeddingOutput(job.vectors))
        else:
            self._end(job, EmbeddingOutput(None, FinishReason.ERROR, "an embedding is not finite"))

    def _end(self, job: Job, output: EmbeddingOutput) -> None:
        self._drop(job)
        if job.request.reply.set_running_or_notify_cancel():  # False if it was cancelled
            job.request.reply.set_result(output)

    def _drop(self, job: Job) -> None:
        self._jobs.remove(job)
        if self._long is not None and self._long.job is job:
            self._long = None
