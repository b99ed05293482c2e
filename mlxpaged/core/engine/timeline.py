"""The timeline of one request: how long each phase took from its arrival to its end, and how it was computed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mlxpaged.core.scheduling.sequence import Sequence, SequenceStatus
from mlxpaged.core.step import Row


class Phase(Enum):
    """The phases of a request. PREFILL lasts until the next token is sampled, also after a preemption."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"


@dataclass(frozen=True)
class Timeline:
    """The four phases add up to total_seconds, from arrival to the last token.

    cached_tokens + sum(prompt_chunks) is the prompt's length: cached tokens may also be found while the request runs.
    recomputed_tokens: computed again after a preemption. steps: the number of its forward passes. stop_cause: as in
    RequestOutput.
    """

    total_seconds: float
    queued_seconds: float
    prefill_seconds: float
    decode_seconds: float
    preempted_seconds: float
    cached_tokens: int
    prompt_chunks: tuple[int, ...]
    recomputed_tokens: int
    steps: int
    preemptions: int
    swaps_out: int
    swaps_in: int
    stop_cause: str | None = None


class TimelineRecorder:
    """Follows one sequence. All times are seconds on the engine's clock, and never decrease from call to call."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self._phase = Phase.QUEUED
        self._since = sequence.arrival_time
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._cached_tokens = 0
        self._prompt_chunks: list[int] = []
        self._recomputed_tokens = 0
        self._steps = 0
        self._preemptions = 0  # preemptions before the latest step
        self._reached = 0  # leading tokens that were computed or found in the cache at least once

    def _enter(self, phase: Phase, now: float) -> None:
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def schedule(self, row: Row, now: float) -> None:
        """A step is about to run this row of the sequence."""
        sequence = self._sequence
        if self._phase is Phase.QUEUED or sequence.num_preemptions > self._preemptions:
            decodes = row.decodes and sequence.num_output_tokens > 0  # swapped in, or all but one token cached
            self._enter(Phase.DECODE if decodes else Phase.PREFILL, now)
        self._preemptions = sequence.num_preemptions
        prompt = sequence.num_prompt_tokens
        self._cached_tokens += max(0, min(row.start, prompt) - self._reached)
        chunk = min(row.context_len, prompt) - max(row.start, self._reached)
        if chunk > 0:
            self._prompt_chunks.append(chunk)
        self._recomputed_tokens += max(0, min(row.context_len, self._reached) - row.start)
        self._reached = max(row.context_len, self._reached)
        self._steps += 1

    def check_preempted(self, now: float) -> bool:
        """Return True, and enter PREEMPTED, if the sequence no longer runs."""
        if self._sequence.status is SequenceStatus.RUNNING:
            return False
        self._enter(Phase.PREEMPTED, now)
        return True

    def sample_token(self, now: float) -> None:
        if self._phase is Phase.PREFILL:
            self._enter(Phase.DECODE, now)

    def finish(self, now: float, stop_cause: str | None = None) -> Timeline:
        self._enter(self._phase, now)
        sequence, seconds = self._sequence, self._seconds
        return Timeline(
            total_seconds=now - sequence.arrival_time,
            queued_seconds=seconds[Phase.QUEUED],
            prefill_seconds=seconds[Phase.PREFILL],
            decode_seconds=seconds[Phase.DECODE],
            preempted_seconds=seconds[Phase.PREEMPTED],
            cached_tokens=self._cached_tokens,
            prompt_chunks=tuple(self._prompt_chunks),
            recomputed_tokens=self._recomputed_tokens,
            steps=self._steps,
            preemptions=sequence.num_preemptions,
            swaps_out=sequence.kv.num_swaps_out,
            swaps_in=sequence.kv.num_swaps_in,
            stop_cause=stop_cause,
        )
