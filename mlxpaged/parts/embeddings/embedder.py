"""Computes embeddings on the engine thread: queues requests, and runs one limited forward pass between other steps."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpaged.core.engine.request import EndedRequest
from mlxpaged.core.engine.stall import StepSize
from mlxpaged.core.scheduling.sequence import FinishReason, SequenceStatus
from mlxpaged.cpu.streams import synchronize
from mlxpaged.library_errors import public_reason
from mlxpaged.models.encoders.embedding import EmbeddingModel
from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.parts.embeddings.embedding_line import EmbeddingOutput, EmbeddingRequest, Job, Line, Row
from mlxpaged.parts.embeddings.embedding_passes import DecoderPasses, EncoderPasses, Passes
from mlxpaged.process_memory import is_out_of_memory

logger = logging.getLogger(__name__)

STEP_TOKENS = 256
"""Tokens of a forward pass, padding included, while other requests generate. It delays them about as much as a prompt
chunk of this size. Shorter inputs are computed together. Longer ones are computed alone, in parts that each cost as
much."""

MEDIUM_TOKENS = 2048
"""Inputs up to this length do not wait for the parts of longer ones. One of them may hold a state beside a longer one,
and the memory for that is reserved."""


@dataclass(frozen=True)
class EmbedderStats:
    """Counters (`total`) only increase."""

    waiting: int = 0  # inputs that are not done
    requests_total: int = 0
    tokens_total: int = 0
    steps_total: int = 0


NO_EMBEDDINGS = EmbedderStats()


class Embedder:
    """Runs one forward pass at a time. Short inputs, those of medium length and long ones wait in lines of their own,
    and the lines that have inputs take turns. In each, clients do. At most one medium and one long input hold a state
    between two passes."""

    def __init__(self, model: EmbeddingModel | EncoderModel, max_step_tokens: int) -> None:
        """max_step_tokens: tokens of a forward pass while no request generates."""
        self.model = model
        held_tokens = model.max_tokens + (MEDIUM_TOKENS if model.max_tokens > MEDIUM_TOKENS else 0)
        self._passes: Passes = (
            EncoderPasses(model, max(max_step_tokens, held_tokens))
            if isinstance(model, EncoderModel)
            else DecoderPasses(model, held_tokens)
        )
        self.step_bytes = self._passes.step_bytes
        self._max_step_tokens = max_step_tokens
        self._step_tokens = min(STEP_TOKENS, max_step_tokens)
        self._jobs: list[Job] = []
        self._short = Line(-1, self._step_tokens)
        self._lines = [self._short, Line(self._step_tokens, MEDIUM_TOKENS), Line(MEDIUM_TOKENS, sys.maxsize)]
        self._requests = self._tokens = self._steps = 0
        self.step_size = StepSize(0, 0, None)  # of the latest forward pass

    def add(self, request: EmbeddingRequest) -> None:
        job = Job(request)
        self._jobs.append(job)
        for line in self._lines:
            line.add(job)

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
        line = next((line for line in self._lines if line.has_work), None)
        if line is None:
            return
        self._lines.remove(line)
        self._lines.append(line)
        budget = self._max_step_tokens if alone else self._step_tokens
        if line is self._short:
            self._run(line.take(lambda lengths: self._passes.num_tokens(lengths) <= budget), budget)
        else:
            line.held = line.held or line.take_one()
            self._run([line.held], budget)

    def _run(self, rows: Sequence[Row], budget: int) -> None:
        """Compute short inputs, or the next part of a long one. If inputs of several requests fail together, each
        request runs again alone, so that only the faulty one ends."""
        self.step_size = StepSize(len(rows), self._passes.size(rows, budget), None)
        try:
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
        for line in self._lines:
            if line.held is row:
                line.held = None
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
        for line in self._lines:
            line.remove(job)
