"""Records that cross between the API and the engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.timeline import Timeline
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, SequenceStatus


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float  # seconds on the engine's clock
    priority: Priority = Priority.NORMAL
    fork_of: str | None = None  # an earlier request with the same prompt, whose blocks this one shares
    timeout: float | None = None  # seconds from arrival to the complete answer
    ttft_timeout: float | None = None  # seconds from arrival to the first token
    timeline: bool = False  # whether to record one
    cache_salt: tuple[str, ...] = ()  # only requests with the same one share blocks of the prefix cache
    adapter: str | None = None  # name of the LoRA adapter that answers; None: the model without one
    images: tuple[Any, ...] = ()  # that the prompt shows: a PromptImage each, which only parts/images/ reads
    resumed: tuple[int, ...] = ()  # the tokens of its answer that another engine has already given
    client: str = ""  # none keeps all blocks and sequence slots from another one


class RequestOutput(NamedTuple):
    """What one step adds to one answer. text is empty while a character or a stop string is incomplete.

    finish_reason is set on the last output of a request, together with `error` if the answer is not complete and
    `timeline` if the request asked for one. num_output_tokens counts all tokens so far, including the one that ended
    the answer. stop_string: the one that ended the answer. stop_cause: what a part has found in the answer, if that
    ended it, as the value of a header: a name, and parameters after it. prompt_logprobs: set on the first output if the
    request asked for them; incomplete if `error` is set. num_drafted, num_accepted: draft tokens so far that were
    verified, and those of them that are tokens of the answer. It is a NamedTuple because there is one for every token:
    making it takes less than half the time of a frozen dataclass.
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
    stop_cause: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_drafted: int = 0
    num_accepted: int = 0


def failed(request: Request, num_tokens: int, now: float, error: str) -> RequestOutput:
    """The last output of a request that no engine has now. num_tokens: of its answer so far."""
    reason = FinishReason.ERROR
    return RequestOutput(request.request_id, now, num_output_tokens=num_tokens, finish_reason=reason, error=error)


@dataclass(frozen=True)
class EndedRequest:
    """The last state of a cancelled request."""

    request_id: str
    status: SequenceStatus
    num_output_tokens: int
