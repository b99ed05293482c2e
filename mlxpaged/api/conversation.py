"""A conversation, whichever API it came over: rendered by the chat template, submitted, its answers read in parts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mlxpaged.api.answer_parser import AnswerParser
from mlxpaged.api.demands import answer_form
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.openai.generation import Generation, begin, check_text_length, check_token_ids
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.openai.terms import Terms, terms_of
from mlxpaged.api.server import server_of
from mlxpaged.engine import EngineInfo, Thinking
from mlxpaged.models.tokenizer import RENDERING_OPTIONS


@dataclass(frozen=True)
class Conversation:
    """One that the engine has."""

    info: EngineInfo
    terms: Terms
    generation: Generation
    new_parser: Callable[[], AnswerParser]
    """For one of the answers."""


async def start(request: Request, ask: Callable[[], ChatRequest], id_prefix: str) -> Conversation:
    """ask: makes the request of what the client sent; run where that takes as long as it is large. Raises what it and
    `Generation.submit` and `render` raise."""
    server = server_of(request)
    body = await server.prepare(request, ask)
    engine, info = server.ready(body.model)
    terms = terms_of(request, body, engine.config, id_prefix)
    tags = info.tokenizer.tags
    with begin(server, engine, terms, body, num_prompts=1) as generation:
        tools = await server.prepare(request, lambda: body.offered_tools)
        params = dataclasses.replace(
            await server.prepare(request, body.params),
            think_tags=True,
            tool_tags=bool(tools),
            thinking_budget=body.thinking_limit,
        )
        prompt = await render(request, info, body)
        check_token_ids(info, params, "messages", [prompt])
        thinking = thinking_of(info, body, prompt)
        form = await server.prepare(request, lambda: answer_form(body, tags, thinking))
        await server.compile(info, form)
        params = dataclasses.replace(params, begins_thinking=thinking == "open", constraint=form)
        generation.submit("messages", [prompt], params)
    one_call = body.parallel_tool_calls is False
    return Conversation(info, terms, generation, lambda: AnswerParser(tags, thinking == "open", tools, one_call, form))


async def render(request: Request, info: EngineInfo, body: ChatRequest) -> list[int]:
    """The prompt's tokens. Raises ApiError or ChatTemplateError."""
    server = server_of(request)
    return await server.tokenize(await server.prepare(request, lambda: rendering(info, body)))


def rendering(info: EngineInfo, body: ChatRequest) -> Callable[[], list[int]]:
    """What renders the prompt, for the tokenizer's thread. Raises ApiError."""
    tools, options = body.offered_tools, dict(body.chat_template_kwargs or {})
    check_template(info, body, options)
    options |= thinking_switch(info, body)
    messages = [message.for_template() for message in body.messages]
    num_chars = sum(len(message["content"]) for message in messages) + sum(len(json.dumps(tool)) for tool in tools)
    check_text_length(info, "messages", num_chars)
    continues = bool(body.continue_final_message)
    if tools:
        options["tools"] = tools
    if continues:
        options["continue_final_message"] = True
    generation_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return lambda: info.tokenizer.apply_chat_template(messages, generation_prompt, **options)


def check_template(info: EngineInfo, body: ChatRequest, options: dict[str, Any]) -> None:
    """Raises ApiError for what this model's template would pass over in silence, or its answers not show."""
    tokenizer = info.tokenizer
    for name in options:
        param = f"chat_template_kwargs.{name}"
        if name in RENDERING_OPTIONS:
            raise bad_parameter(param, "is not a variable of a chat template")
        if not tokenizer.template_reads(name):
            raise bad_parameter(param, "this model's chat template has no such variable")
    for field in ("thinking_budget", "reasoning_effort"):
        if getattr(body, field) not in (None, "none") and not tokenizer.tags.think_start:
            raise bad_parameter(field, "this model does not think, as far as its vocabulary shows")
    if any(message.tool_calls for message in body.messages) and not tokenizer.template_reads("tool_calls"):
        raise bad_parameter("messages", "this model's chat template does not show tool_calls to the model")
    if body.offered_tools:
        if not tokenizer.template_reads("tools"):
            raise bad_parameter("tools", "this model's chat template does not show tools to the model")
        if tokenizer.tags.tools is None:
            message = "how this model writes its calls is not known; --tool-parser can tell the server"
            raise bad_parameter("tools", message)


def thinking_switch(info: EngineInfo, body: ChatRequest) -> dict[str, Any]:
    """The template's variable for reasoning_effort "none"; {} where the model does not think anyway. Raises ApiError
    where it cannot be kept from it."""
    tokenizer = info.tokenizer
    if body.reasoning_effort != "none" or not tokenizer.tags.think_start:
        return {}
    if not tokenizer.template_reads("enable_thinking"):
        message = "'none': this model's chat template has no enable_thinking to keep it from thinking"
        raise bad_parameter("reasoning_effort", message)
    if (body.chat_template_kwargs or {}).get("enable_thinking"):
        raise bad_parameter("reasoning_effort", "is 'none', but chat_template_kwargs has enable_thinking")
    return {"enable_thinking": False}


def thinking_of(info: EngineInfo, body: ChatRequest, prompt: list[int]) -> Thinking:
    """Whether the prompt ends inside a think block, or where the model may open one."""
    tags = info.tokenizer.tags
    if not tags.think_start:
        return "never"
    if body.continue_final_message:
        last = str(body.messages[-1].for_template()["content"])
        return "open" if last.rfind(tags.think_start) > last.rfind(tags.think_end) else "never"
    if info.tokenizer.ends_with(prompt, tags.think_start):
        return "open"
    return "never" if info.tokenizer.ends_with(prompt, tags.think_end) else "may"
