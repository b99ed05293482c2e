"""Computes embeddings on the engine thread: queues requests, and runs one limited forward pass between other steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.request import EndedRequest
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.scheduling.sequence import FinishReason, SequenceStatus
from mlxpaged.cpu.streams import synchronize
from mlxpaged.library_errors import public_reason
from mlxpaged.models.encoders.embedding import EmbeddingModel
from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.parts.embeddings.embedding_passes import DecoderPasses, EncoderPasses, Input, Passes, Vectors
from mlxpaged.process_memory import is_out_of_memory, require_memory

logger = logging.getLogger(__name__)

STEP_TOKENS = 256
"""Tokens of a forward pass, padding included, while other requests generate. It delays them about as much as a prompt
chunk of this size. Longer inputs are computed alone, in parts. Shorter inputs are computed together."""


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
        self.short = deque(order[len(self.long) :])


@dataclass
class Row(Input):
    """One input of a job."""

    job: Job = field(kw_only=True)
    index: int = field(kw_only=True)


def row_of(job: Job, index: int) -> Row:
    tokens, seconds = job.request.inputs[index], job.request.seconds
    return Row(tokens, seconds[index] if seconds else len(tokens), job=job, index=index)


class Embedder:
    """Runs inputs of all requests in turn. At most one long input holds a state between two passes."""

    def __init__(self, model: EmbeddingModel | EncoderModel, max_step_tokens: int) -> None:
        """max_step_tokens: tokens of a forward pass while no request generates."""
        self.model = model
        self._passes: Passes = (
            EncoderPasses(model, max_step_tokens) if isinstance(model, EncoderModel) else DecoderPasses(model)
        )
        self.step_bytes = self._passes.step_bytes
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
            self._long = row_of(first, first.long.pop())
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
        """Short inputs, perhaps of several jobs, that have at most `budget` tokens in a pass."""
        rows: list[Row] = []
        lengths: list[int] = []
        for job in self._jobs:
            while job.short:
                lengths.append(len(job.request.inputs[job.short[0]]))
                if self._passes.num_tokens(lengths) > budget:
                    lengths.pop()
                    break
                rows.append(row_of(job, job.short.popleft()))
        self._move_to_the_end(rows[0].job)
        return rows

    def _move_to_the_end(self, job: Job) -> None:
        self._jobs.remove(job)
        self._jobs.append(job)

    def _run(self, rows: Sequence[Row], budget: int) -> None:
        """Compute short inputs, or the next part of a long one. If inputs of several requests fail together, each
        request runs again alone, so that only the faulty one ends."""
        self.step_size = StepSize(len(rows), self._passes.size(rows, budget), None)
        try:
            require_memory(self.step_bytes, "a step of embeddings")
            num_tokens = self._passes.run(rows, budget)
        except Exception as error:
            logger.exception("embedding %d inputs failed", len(rows))
            synchronize()
            if is_out_of_memory(error):
                mx.clear_cache()
            jobs = {row.job for row in rows}
            for job in jobs if len(jobs) > 1 else ():
                self._run([row for row in rows if row.job is job], budget)
            if len(jobs) == 1:
                message = f"the embeddings failed: {type(error).__name__}: {public_reason(error)}"
                reason = FinishReason.MEMORY if is_out_of_memory(error) else FinishReason.ERROR
                self._end(rows[0].job, EmbeddingOutput(None, reason, message))
            return
        self._steps += 1
        self._tokens += num_tokens
        for row in rows:
            if row.is_done:
                self._finish(row)

    def _finish(self, row: Row) -> None:
        job, vector = row.job, row.vector
        assert vector is not None
        if row is self._long:
            self._long = None
        for dense in self.model.spec.dense:
            vector = dense(vector)
        vector = vector[: job.request.dimensions]
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
