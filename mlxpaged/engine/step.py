"""A step in flight: its forward pass is launched first, its sampler later, and its tokens are read at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.cache.table_rows import IntArray
from mlxpaged.engine.grammar import Grammars, Mask
from mlxpaged.engine.model_runner import DeviceError, ModelRunner, SampledTokens, device_errors
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken, Sampler, Samples
from mlxpaged.scheduler import Batch, ScheduledSequence, SequenceStatus


class HostError(Exception):
    """The host could not build a step. The cause is the original exception. The KV pools are intact."""


class StepResult(NamedTuple):
    """tokens: the sampled tokens by sequence id. invalid: ids of sequences whose logits are not finite."""

    tokens: dict[int, SampledToken]
    invalid: set[int]


class InFlightStep:
    """A step that was launched and not read yet.

    batch: what the forward pass computes. started: seconds on the engine's clock. logits[R, V]: of the R rows that
    sample.
    """

    def __init__(self, batch: Batch, started: float, logits: mx.array) -> None:
        self.batch = batch
        self.started = started
        self.rows: ListOf[ScheduledSequence] = batch.rows
        self.sampled_ids: list[int] = []
        self.logits: mx.array | None = logits
        self._max_logits = logits.max(axis=-1)
        self._samples: Samples | None = None

    @property
    def tokens(self) -> SampledTokens:
        """The sampled tokens on the device, for the forward pass of the next step."""
        assert self._samples is not None
        return SampledTokens(self._samples.tokens, self.sampled_ids)

    @property
    def results(self) -> list[mx.array]:
        return [self._max_logits, *(self._samples.arrays if self._samples is not None else ())]

    def set_samples(self, rows: ListOf[ScheduledSequence], sampled_ids: list[int], samples: Samples | None) -> None:
        """rows: those whose sequences still ran when the step was sampled."""
        self.rows, self.sampled_ids, self._samples = rows, sampled_ids, samples
        self.logits = None

    def read(self) -> StepResult:
        """Wait for the device. Raises DeviceError."""
        with device_errors():
            maxima: list[float] = self._max_logits.tolist()  # type: ignore[assignment]
            sampled = [] if self._samples is None else self._samples.read()
        # A step that samples nothing still projects its last row.
        projected = [row for row in self.batch.rows if row.samples] or self.batch.rows[-1:]
        rows = zip(projected, maxima, strict=True)
        invalid = {row.sequence.sequence_id for row, maximum in rows if not math.isfinite(maximum)}
        return StepResult(dict(zip(self.sampled_ids, sampled, strict=True)), invalid)


class StepLauncher:
    """Launches the forward pass of a step, and later its sampler.

    clock: the engine's, in seconds. Raises HostError and DeviceError.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._sampler = sampler
        self._grammars = grammars
        self._clock = clock

    def launch(self, batch: Batch, block_tables: IntArray, previous: InFlightStep | None) -> InFlightStep:
        """Launch the forward pass. block_tables[S, max_blocks]: those of the batch's rows. previous: the step in flight
        whose sampled tokens take the place of pending ones."""
        started = self._clock()
        try:
            tokens = None if previous is None or not previous.sampled_ids else previous.tokens
            step = InFlightStep(batch, started, self._runner.forward(batch, block_tables, tokens))
        except DeviceError:
            raise
        except Exception as error:
            raise HostError from error
        assert step.logits is not None
        self._runner.start_step(step.logits, *step.results)
        return step

    def sample(self, step: InFlightStep, requests: Mapping[int, RunningRequest]) -> None:
        """Launch the sampler, for the sequences that still run: the previous step may have ended some.

        requests: by sequence id. The host has processed all earlier tokens of these sequences, so grammars, forced
        tokens and penalties are exact, while the device still computes the logits.
        """
        rows = [row for row in step.batch.rows if row.sequence.status is SequenceStatus.RUNNING]
        sampling = [row for row in rows if row.samples]
        try:
            samples = self._sample(step, sampling, requests) if sampling else None
        except Exception as error:
            raise HostError from error
        step.set_samples(rows, [row.sequence.sequence_id for row in sampling], samples)
        self._runner.start_step(*step.results)

    def _sample(
        self, step: InFlightStep, sampling: ListOf[ScheduledSequence], requests: Mapping[int, RunningRequest]
    ) -> Samples:
        logits = step.logits
        assert logits is not None
        if len(sampling) < logits.shape[0]:
            kept = {row.sequence.sequence_id for row in sampling}
            projected = [row.sequence.sequence_id for row in step.batch.rows if row.samples]
            logits = logits[mx.array([i for i, sequence_id in enumerate(projected) if sequence_id in kept])]
        running = [(requests[row.sequence.sequence_id], row.context_len) for row in sampling]
        masks = self._masks(running)
        rows = [
            request.sampling_row(position, masks.get(request.sequence.sequence_id)) for request, position in running
        ]
        return self._sampler.sample(logits, rows)

    def _masks(self, running: ListOf[tuple[RunningRequest, int]]) -> dict[int, Mask]:
        """The token masks of the requests with a grammar, by sequence id."""
        constrained = {
            request.sequence.sequence_id: (request.matcher, request.forbidden(position))
            for request, position in running
            if request.matcher is not None
        }
        if not constrained:
            return {}
        return dict(zip(constrained, self._grammars.masks(list(constrained.values())), strict=True))
