"""A step that the device works on, and what it draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from mlxpaged.engine.model_runner import DrawnTokens
from mlxpaged.engine.sampler import SampledToken, Samples
from mlxpaged.scheduler import Batch


@dataclass(frozen=True)
class StepUnderWay:
    """A step that the device works on. started: when it was made up, by the engine's clock. peaks: the largest logit of
    every row, which shows whether they are finite."""

    batch: Batch
    started: float
    peaks: mx.array
    samples: Samples | None

    @property
    def drawn(self) -> DrawnTokens | None:
        if self.samples is None:
            return None
        return DrawnTokens(self.samples.tokens, sampling_ids(self.batch))

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
