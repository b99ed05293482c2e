"""Adds to a request what its profile says and the client does not."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxpaged.api.generation.check import asked_to_think
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.registry.profile import Profile


def with_profile(request: GenerationRequest, profile: Profile | None) -> GenerationRequest:
    """What the client says holds, be it a field or a system message."""
    if profile is None:
        return request
    sampling = dict(profile.sampling)
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])  # -1 is no limit, which is 0 in the engine
    request = request.with_defaults(sampling)
    params = request.params
    if params.max_tokens is None:
        params = dataclasses.replace(params, max_tokens=profile.max_tokens)
    prompt = request.prompt
    if isinstance(prompt, Chat):
        changes: dict[str, Any] = {}
        if profile.thinking is not None and says_nothing_of_thinking(prompt, params):
            changes["enable_thinking"] = profile.thinking
        if profile.system is not None and not any(message["role"] == "system" for message in prompt.messages):
            changes["messages"] = [{"role": "system", "content": profile.system}, *prompt.messages]
        prompt = dataclasses.replace(prompt, **changes)
    own_limit = None if params.thinking_budget is not None else profile.thinking_limit
    return dataclasses.replace(request, params=params, prompt=prompt, thinking_limit=own_limit)


def says_nothing_of_thinking(chat: Chat, params: SamplingParams) -> bool:
    return asked_to_think(chat) is None and chat.effort is None and params.thinking_budget is None
