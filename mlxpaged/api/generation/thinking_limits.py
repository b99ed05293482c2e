"""Limits the thoughts of an answer by what the server allows."""

from __future__ import annotations

import dataclasses

from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.info import EngineInfo


def with_thinking_limits(params: SamplingParams, info: EngineInfo, num_prompt_tokens: int) -> SamplingParams:
    """Takes the smaller of the limits of the client and the server. With log-probabilities, only the client's counts:
    the token that ends a thought at a limit is not sampled, and has none. Raises PromptTooLongError."""
    if info.thinking_limit is None or params.logprobs is not None:
        return params
    budget = info.thinking_limit.of(info.max_new_tokens(num_prompt_tokens, params.max_tokens))
    if params.thinking_budget is not None:
        budget = min(budget, params.thinking_budget)
    return dataclasses.replace(params, thinking_budget=budget)
