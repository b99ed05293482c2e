"""Records that cross between the API and the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mlxpaged.engine.sampling_params import SamplingParams
from mlxpaged.engine.timeline import Timeline
from mlxpaged.scheduler import FinishReason, Priority, SequenceStatus


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it. arrival_time: seconds on the engine's clock. fork_of: an earlier request with
    the same prompt, whose blocks this one shares. timeout, ttft_timeout: seconds from arrival in which the answer must
    be complete, and its first token generated; None for any time. timeline: whether one is recorded."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: Priority = Priority.NORMAL
    fork_of: str | None = None
    timeout: float | None = None
    ttft_timeout: float | None = None
    timeline: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's logits before bias, penalties and temperature.

    top: the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(NamedTuple):
    """What one step adds to one answer. text may be empty while a character or a stop string may still be growing.

    finish_reason is set on the last output of a request, with it `error` where the answer is not complete, and
    `timeline` where the request asked for one. num_output_tokens counts all tokens so far, the one that ended the
    answer included. stop_string: the one that ended the answer, if any. A tuple, since there is one for every token: it
    is made in less than half of a frozen dataclass's time.
    """

    request_id: str
    time: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    timeline: Timeline | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class EndedRequest:
    """A request that was cancelled, as it was just before."""

    request_id: str
    status: SequenceStatus
    num_output_tokens: int
