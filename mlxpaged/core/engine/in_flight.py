"""A step in flight: its forward pass is launched first, its sampler with it or later, and its tokens are read at the
end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from mlxpaged.core.engine.logprobs import PromptRows
from mlxpaged.core.engine.model_runner import device_errors
from mlxpaged.core.engine.prompt_logits import StepLogprobs
from mlxpaged.core.engine.sampler import SampledToken, Samples
from mlxpaged.core.engine.step_input import NO_TOKENS, SampledTokens
from mlxpaged.core.step import Row, Step


class HostError(Exception):
    """The host could not build a step. The cause is the original exception. The KV pools are intact."""


PromptResult = tuple[range, PromptRows]
"""Positions of prompt tokens, and what a step computed for them."""


class StepResult(NamedTuple):
    """tokens: the sampled tokens by sequence id. invalid: ids of sequences whose logits are not finite.
    prompt_logprobs: by sequence id."""

    tokens: dict[int, list[SampledToken]]
    invalid: set[int]
    prompt_logprobs: Mapping[int, PromptResult] = MappingProxyType({})


class InFlightStep:
    """A step that is launched and whose tokens are not read yet.

    scheduled: what the forward pass computes. rows: those whose sequences still ran when the previous step was
    processed. started: seconds on the engine's clock. logits[R + P, V]: as `ModelRunner.forward` returns them. prompts:
    the P prompt tokens. top: the most likely tokens to report for each of them. absent[V]: tokens that do not exist, if
    there are any. is_usual: whether other steps take as long: it moves no blocks, and was not traced. sampled_ids: the
    sequence of each sampled token. more: what parts compute with it.
    """

    def __init__(
        self,
        scheduled: Step,
        started: float,
        logits: mx.array,
        prompts: ListOf[int] = (),
        top: int = 0,
        absent: mx.array | None = None,
    ) -> None:
        self.scheduled = scheduled
        self.started = started
        self.is_usual = True
        self.more: list[mx.array] = []
        self.rows: ListOf[Row] = scheduled.rows
        self.sampled_ids: list[int] = []
        self._prompt_logprobs: StepLogprobs | None = None
        if prompts:
            projected = logits.shape[0] - len(prompts)
            rows = [row for row in scheduled.rows if row.prompt_logprobs]
            self._prompt_logprobs = StepLogprobs(rows, list(prompts), logits[projected:], top, absent)
            logits = logits[mx.arange(projected)]  # a copy: a slice would keep all rows until the sampler has run
        self.logits: mx.array | None = logits
        self._max_logits = logits.max(axis=-1)
        self._samples: Samples | None = None

    @property
    def tokens(self) -> SampledTokens:
        """The sampled tokens on the device, for the forward pass of the next step."""
        return NO_TOKENS if self._samples is None else SampledTokens(self._samples.tokens, self.sampled_ids)

    def logits_of(self, sequence_ids: ListOf[int]) -> mx.array:
        """The logits from which the tokens of these sequences are sampled. sequence_ids: of each token, in the order of
        the step."""
        assert self.logits is not None
        if len(sequence_ids) == self.logits.shape[0]:
            return self.logits
        chosen = set(sequence_ids)
        return self.logits[mx.array([i for i, each in enumerate(self._projected) if each in chosen])]

    @property
    def _projected(self) -> list[int]:
        """The sequences of the rows of logits. A step that samples nothing still projects its last token."""
        rows = self.scheduled.rows
        return [row.sequence_id for row in rows for _ in range(row.num_sampled)] or [rows[-1].sequence_id]

    @property
    def is_sampled(self) -> bool:
        """Whether its sampler is launched, or nothing is to be sampled."""
        return self.logits is None

    @property
    def results(self) -> list[mx.array]:
        return [
            self._max_logits,
            *(() if self.logits is None else (self.logits,)),
            *(self._samples.arrays if self._samples is not None else ()),
            *(self._prompt_logprobs.arrays if self._prompt_logprobs is not None else ()),
            *self.more,
        ]

    def set_samples(self, sampled_ids: list[int], samples: Samples | None) -> None:
        self.sampled_ids, self._samples = sampled_ids, samples
        self.logits = None

    def read(self) -> StepResult:
        """Wait for the device. Raises DeviceError."""
        with device_errors():
            maxima: list[float] = self._max_logits.tolist()  # type: ignore[assignment]
            sampled = [] if self._samples is None else self._samples.read()
            prompts = {} if self._prompt_logprobs is None else self._prompt_logprobs.read()
        projected = zip(self._projected, maxima, strict=True)
        invalid = {sequence_id for sequence_id, maximum in projected if not math.isfinite(maximum)}
        invalid |= {sequence_id for sequence_id, (_, rows) in prompts.items() if not rows.is_finite}
        tokens: dict[int, list[SampledToken]] = {row.sequence_id: [] for row in self.rows if row.samples}
        for sequence_id, token in zip(self.sampled_ids, sampled, strict=True):
            if sequence_id in tokens:
                tokens[sequence_id].append(token)
        return StepResult(tokens, invalid, prompts)
