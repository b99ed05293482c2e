"""Limits the thoughts of an answer by what the server and the profile allow."""

from __future__ import annotations

import dataclasses

from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.info import EngineInfo


def with_thinking_limits(
    request: GenerationRequest, params: SamplingParams, info: EngineInfo, num_prompt_tokens: int
) -> SamplingParams:
    """Takes the smallest of the limits of the client, the profile and the server. With log-probabilities, only the
    client's counts: the token that ends a thought at a limit is not sampled, and has none. Raises
    PromptTooLongError."""
    limits = [each for each in (request.thinking_limit, info.thinking_limit) if each is not None]
    if not limits or params.logprobs is not None:
        return params
    room = info.max_new_tokens(num_prompt_tokens, params.max_tokens)
    budgets = [limit.of(room) for limit in limits]
    if params.thinking_budget is not None:
        budgets.append(params.thinking_budget)
    return dataclasses.replace(params, thinking_budget=min(budgets))
