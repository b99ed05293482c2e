"""Translates requests of Ollama's API into the neutral request for text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.request import (
    MAX_LOGPROBS,
    Chat,
    GenerationRequest,
    Tool,
    function_call,
    given_fields,
    sampling_params,
)
from mlxpaged.api.media import Shown, media_of
from mlxpaged.api.ollama import schema
from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.models.text.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
THINK_TOKENS = {"low": 1024, "medium": 4096}
"""Limits of the thinking in tokens, by `think`. "high" and "max" set no limit."""
CLIENT_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "thinking": "think",
}


def translate_chat(body: schema.OllamaChatRequest, model: str) -> GenerationRequest:
    """model: the served model that the request names. Raises ApiError."""
    tools = [
        Tool(
            tool.function.name, tool.function.description, tool.function.parameters, tool.function.strict, f"tools.{i}"
        )
        for i, tool in enumerate(body.tools or ())
        if isinstance(tool, schema.FunctionTool)
    ]
    messages = messages_of(body.messages or [])
    chat = chat_of(body, messages, media_of(body.messages or [], "messages"), tools)
    # Ollama continues the last message if it is the assistant's.
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return translated(body, model, replace(chat, continue_final_message=continues))


def translate_prompt(body: schema.OllamaGenerateRequest, model: str, tokenizer: Tokenizer) -> GenerationRequest:
    """model: the served model that the request names. The prompt is a user's message, unless the request asks for the
    prompt as it is or has a suffix, or the model has no chat template. Raises ApiError."""
    text = body.prompt or ""
    if body.suffix:
        filled = replace(translated(body, model, [text]), suffix=body.suffix)
        return replace(filled, split_special_tokens=not body.raw)
    if not body.raw and tokenizer.has_chat_template:
        system = [{"role": "system", "content": body.system}] if body.system else []
        shown = schema.images_of(body.images)
        said = {"role": "user", "content": "".join(each.text for each in shown) + text}
        media = [Shown(each, f"images.{i}", "images", True) for i, each in enumerate(shown)]
        return translated(body, model, chat_of(body, [*system, said], media))
    for name in ("system", "think", "images"):
        if getattr(body, name):
            raise bad_parameter(name, "this model has no chat template, which would show it to the model")
    return replace(translated(body, model, [text]), split_special_tokens=not body.raw)


def translated(body: schema.GeneratingFields, model: str, prompt: Chat | list[str]) -> GenerationRequest:
    names = CLIENT_NAMES | ({"messages": "prompt"} if isinstance(body, schema.OllamaGenerateRequest) else {})
    others = params_of(body)
    options = body.options or schema.Options()
    chosen = frozenset(given_fields(options, SamplingParams)) | frozenset(others)
    params = sampling_params(options, **others)
    most = None if body.streams else MAX_LOGPROBS
    return GenerationRequest(prompt, params, model, timed=True, most_logprobs=most, chosen=chosen, client_names=names)


def chat_of(
    body: schema.GeneratingFields,
    messages: list[dict[str, Any]],
    media: Sequence[Shown],
    tools: Sequence[Tool] = (),
) -> Chat:
    return Chat(
        messages=messages,
        media=media,
        tools=tools,
        enable_thinking=None if body.think is None else body.think is not False,
        needs_thinking=bool(body.think),
        effort=body.think if isinstance(body.think, str) else None,
    )


def params_of(body: schema.GeneratingFields) -> dict[str, Any]:
    """Returns the parameters that have other names or other values in Ollama's API."""
    options = body.options or schema.Options()
    others: dict[str, Any] = {"seed": None if (options.seed or 0) < 0 else options.seed}
    if options.num_predict is not None and options.num_predict > 0:
        others["max_tokens"] = options.num_predict
    if options.repeat_last_n == 0:
        others["repetition_penalty"] = 1.0
    elif options.repeat_penalty is not None:
        others["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n is not None and options.repeat_last_n > 0:
        others["repetition_context_size"] = options.repeat_last_n
    if isinstance(body.think, str):
        others["thinking_budget"] = THINK_TOKENS.get(body.think)
    if body.logprobs:
        others["logprobs"] = body.top_logprobs or 0
    if body.format:
        form = ANY_OBJECT if body.format == "json" else body.format
        others["constraint"] = Constraint("json_schema", json.dumps(form), "format", is_strict=False)
    return others


def messages_of(given: Sequence[schema.Message]) -> list[dict[str, Any]]:
    """Returns the messages for the chat template. Ollama's older clients send calls without ids, and results with the
    tool's name or without anything."""
    found = []
    for i, message in enumerate(given):
        shown = "".join(each.text for each in message.shown_images)
        said: dict[str, Any] = {"role": message.role, "content": shown + (message.content or "")}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            said["tool_calls"] = [
                function_call(call.id or f"call_{i}_{j}", call.function.name, call.function.arguments)
                for j, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            names = {"tool_call_id": message.tool_call_id, "name": message.tool_name}
            said |= {key: value for key, value in names.items() if value}
        found.append(said)
    return found
