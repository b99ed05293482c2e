"""A step on the device: how it is started, and what it draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import mlx.core as mx

from mlxpaged.cache.table_rows import IntArray
from mlxpaged.engine.grammar import Grammars, Mask
from mlxpaged.engine.model_runner import ModelRunner, SampledTokens
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken, Sampler, Samples
from mlxpaged.scheduler import Batch


@dataclass(frozen=True)
class InFlightStep:
    """A step that the device works on. started: when it was made up, by the engine's clock. peaks: the largest logit of
    every row, which shows whether they are finite."""

    batch: Batch
    started: float
    peaks: mx.array
    samples: Samples | None

    @property
    def drawn(self) -> SampledTokens | None:
        if self.samples is None:
            return None
        return SampledTokens(self.samples.tokens, sampling_ids(self.batch))

    @property
    def results(self) -> list[mx.array]:
        return [self.peaks, *(self.samples.arrays if self.samples is not None else ())]

    def read(self) -> dict[int, SampledToken]:
        """Sampled tokens by sequence id. Waits for the device. Raises FloatingPointError."""
        if not all(map(math.isfinite, self.peaks.tolist())):  # type: ignore[arg-type]
            raise FloatingPointError("the model's logits are not finite")
        sampled = [] if self.samples is None else self.samples.read()
        return dict(zip(sampling_ids(self.batch), sampled, strict=True))


def sampling_ids(batch: Batch) -> list[int]:
    return [row.sequence.sequence_id for row in batch.rows if row.samples]


class StepDispatcher:
    """Starts steps: forward pass, masks of grammars and draw, in one go for the device.

    clock: the engine's, seconds."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._clock = clock

    def dispatch(
        self,
        batch: Batch,
        block_tables: IntArray,
        requests: Mapping[int, RunningRequest],
        before: InFlightStep | None,
    ) -> InFlightStep:
        """Start a step. block_tables[n, b]: of the batch's rows. requests: by sequence id. before: the step under way
        that draws its pending tokens."""
        started = self._clock()
        logits = self._runner.forward(batch, block_tables, before.drawn if before is not None else None)
        sampling = [(requests[row.sequence.sequence_id], row.context_len) for row in batch.rows if row.samples]
        masks = self._masks(sampling, logits)
        rows = [
            running.sampling_row(position, masks.get(running.sequence.sequence_id)) for running, position in sampling
        ]
        step = InFlightStep(batch, started, logits.max(axis=-1), self._sampler.sample(logits, rows) if rows else None)
        self._runner.start_step(*step.results)
        return step

    def _masks(self, sampling: ListOf[tuple[RunningRequest, int]], logits: mx.array) -> dict[int, Mask]:
        """By sequence id, of those with a grammar. Made while the device works on the logits."""
        constrained = {
            running.sequence.sequence_id: (running.matcher, running.forbidden(position))
            for running, position in sampling
            if running.matcher is not None
        }
        if not constrained:
            return {}
        self._runner.start_step(logits)
        return dict(zip(constrained, self._grammars.masks(list(constrained.values())), strict=True))
