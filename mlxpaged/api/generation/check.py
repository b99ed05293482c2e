"""Checks a request before it is submitted: whether its fields agree, and what the model and its limits allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.generation.request import MAX_LOGPROBS, Chat, GenerationRequest
from mlxpaged.api.schema import MAX_LIST, MAX_TOOLS
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.engine.info import EngineInfo
from mlxpaged.models.text.infill import Infill
from mlxpaged.models.text.thinking_variables import BUDGET, NAMES
from mlxpaged.models.text.tokenizer import RENDERING_OPTIONS


class ContextLengthError(ApiError):
    """cause: has the numbers, for APIs whose message has another wording."""

    def __init__(self, param: str, cause: PromptTooLongError) -> None:
        super().__init__(400, f"{param}: {cause}", param=param, code="context_length_exceeded")
        self.cause = cause


def check_request(request: GenerationRequest) -> GenerationRequest:
    """Raises ApiError if the fields of a request contradict each other."""
    chat = request.prompt
    if not isinstance(chat, Chat):
        return request
    if request.params.thinking_budget is not None:
        check_thinking_limit(request)
    if len(chat.messages) > MAX_LIST:
        raise request.refusal("messages", f"there are {len(chat.messages)} after conversion; the limit is {MAX_LIST}")
    if len(chat.tools) > MAX_TOOLS:
        raise request.refusal("tools", f"there are {len(chat.tools)} functions; the limit is {MAX_TOOLS}")
    tools, choice = {tool.name for tool in chat.tools}, chat.tool_choice
    if len(tools) < len(chat.tools):
        raise request.refusal("tools", "two functions have the same name")
    if choice.mode == "required" and not tools:
        raise request.refusal("tool_choice", "requires a tool call, but the request has no tools")
    for wanted in (*([] if choice.named is None else [choice.named]), *(choice.allowed or ())):
        if wanted not in tools:
            raise request.refusal("tool_choice", f"no tool has the name {wanted!r}")
    return request


def check_thinking_limit(request: GenerationRequest) -> None:
    """Raises ApiError for fields that the server cannot honour while it limits the thinking."""
    if request.params.logprobs is not None:
        raise request.refusal(
            "logprobs", "cannot be combined with a limit on thinking: the token that ends the thinking is not sampled"
        )


def adapter_of(request: GenerationRequest, of_model: str | None, info: EngineInfo) -> str | None:
    """The adapter that a request names. of_model: the one in the name of its model. Raises ApiError."""
    asked = request.adapters
    if not asked:
        return of_model
    if asked not in info.adapters:
        names = ", ".join(map(repr, info.adapters)) or "none, because it was started without --adapter"
        message = f"{info.model!r} does not have the adapter {asked!r}; it has {names}"
        raise request.refusal("adapters", message, code="adapter_not_found")
    if of_model not in (None, asked):
        raise request.refusal("adapters", f"differs from the adapter of the model {request.model!r}")
    return asked


def asked_to_think(chat: Chat) -> bool | None:
    """Whether the request turns the thinking on or off."""
    if chat.enable_thinking is not None:
        return chat.enable_thinking
    return next((bool(value) for name, value in chat.chat_template_kwargs.items() if name in NAMES), None)


def check_template(request: GenerationRequest, chat: Chat, info: EngineInfo) -> None:
    """Raises ApiError for fields that this model's chat template would ignore, or whose effect nothing could read."""
    tokenizer, name = info.tokenizer, request.client_name
    for variable in chat.chat_template_kwargs:
        param = f"{name('chat_template_kwargs')}.{variable}"
        if variable in RENDERING_OPTIONS:
            raise bad_parameter(param, "is an option of the renderer, not a variable of the chat template")
        if not (tokenizer.template_reads(variable) or variable in NAMES):
            raise bad_parameter(param, "this model's chat template has no such variable")
    if chat.needs_thinking and not tokenizer.tags.thinks:
        raise request.refusal("thinking", "this model does not think: its vocabulary has no thinking tags")


def thinking_variables(request: GenerationRequest, chat: Chat, info: EngineInfo) -> dict[str, Any]:
    """Returns the template's variables for the switch, the effort and the limit, as far as it knows them. Raises
    ApiError if fields contradict each other."""
    tokenizer, given = info.tokenizer, chat.chat_template_kwargs
    variables: dict[str, Any] = dict(tokenizer.efforts.get(chat.effort or "", {}))
    switch = tokenizer.thinking_switch
    if not tokenizer.tags.thinks or switch is None:
        return variables
    if request.params.thinking_budget is not None and switch.variable == BUDGET:
        variables[BUDGET] = request.params.thinking_budget
    thinks = chat.enable_thinking if switch.variable in given else asked_to_think(chat)
    if chat.enable_thinking is False and given.get(switch.variable, switch.off) == switch.on:
        raise request.refusal("thinking", f"is 'none', but chat_template_kwargs.{switch.variable} turns it on")
    if thinks is None or (thinks and (switch.on is None or switch.variable in variables)):
        return variables
    return variables | {switch.variable: switch.on if thinks else switch.off}


def check_text_length(param: str, num_chars: int, info: EngineInfo) -> None:
    """Raises ContextLengthError for a text that cannot fit the context, even with the longest tokens.

    Tokenizing megabytes only to refuse them would keep the prompts of other requests waiting.
    """
    tokens = info.tokenizer.least_tokens(num_chars)
    if tokens > info.longest:
        message = f"the prompt has at least {tokens} tokens; {info.limit}"
        raise ContextLengthError(param, PromptTooLongError(message, tokens, info.longest))


def check_logprobs(
    request: GenerationRequest, params: SamplingParams, prompts: Sequence[Sequence[int]], info: EngineInfo
) -> SamplingParams:
    """Returns the parameters with a max_tokens by which the answers have at most as many log-probabilities as a request
    may ask for, together with those of the prompts. Raises ApiError if they have too many, or if the client's own
    max_tokens allows too many, and PromptTooLongError."""
    of_prompts = 0
    if params.prompt_logprobs is not None:
        copies = 1 if isinstance(request.prompt, Chat) else request.candidates
        of_prompts = copies * (1 + params.prompt_logprobs) * sum(map(len, prompts))
        if of_prompts > MAX_LOGPROBS:
            message = f"asks for {of_prompts} log-probabilities of prompts; the limit is {MAX_LOGPROBS}"
            raise request.refusal("prompt_logprobs", message, code="too_many_logprobs")
    if params.logprobs is None or request.most_logprobs is None:
        return params
    of_token = 1 + (len(params.logprob_token_ids) or params.logprobs)
    left = (request.most_logprobs - of_prompts) // (of_token * len(prompts) * request.candidates)
    if max(info.max_new_tokens(len(prompt), params.max_tokens) for prompt in prompts) <= left:
        return params
    if params.max_tokens is not None or left < 1:
        allows = f"allows answers of more than {request.most_logprobs} log-probabilities together"
        remedy = f"with these fields, at most {max(0, left)} tokens have room; ask for fewer, or for a stream"
        raise request.refusal("max_tokens", f"{allows}: {remedy}", code="too_many_logprobs")
    return dataclasses.replace(params, max_tokens=left)


def infill_of(request: GenerationRequest, info: EngineInfo) -> Infill | None:
    """What marks the middle of a text in prompts of this request; None if it has no suffix. Raises ApiError if the
    model cannot fill it in."""
    if not request.suffix:
        return None
    if info.tokenizer.infill is None:
        message = "this model cannot fill in the middle of a text: its vocabulary has no tokens that mark it"
        raise request.refusal("suffix", message, "unsupported_parameter")
    if request.echo and request.params.prompt_logprobs is not None:
        raise request.refusal("echo", "cannot be combined with logprobs and a suffix: only the prompt is shown of both")
    return info.tokenizer.infill


def check_token_ids(request: GenerationRequest, param: str, prompts: Sequence[Sequence[int]], info: EngineInfo) -> None:
    """Raises ApiError for a prompt without tokens, and for a token id outside the vocabulary. No later check finds
    these. param: the client's field that holds the prompts."""
    by_name = {"logit_bias": list(request.params.logit_bias), "stop_token_ids": list(request.params.stop_token_ids)}
    fields = [(request.client_name(name), ids) for name, ids in by_name.items()]
    for name, ids in (*fields, *((param, ids) for ids in prompts)):
        if ids and max(ids) >= info.vocab_size:
            raise bad_parameter(name, f"token id {max(ids)} is not in the vocabulary of {info.vocab_size} tokens")
    if not all(prompts):
        raise bad_parameter(param, "a prompt must have at least one token")
