"""The tokens of a request's prompts: conversations are rendered by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.requests import Request

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.check import check_request, check_template, check_text_length, thinking_switch
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.engine import EngineInfo, Thinking
from mlxpaged.models.tokenizer import ChatTemplateError


async def count_tokens(http: Request, translate: Callable[[], GenerationRequest]) -> int:
    """The number of tokens of a conversation. Raises what `answers.start` raises."""
    server = server_of(http)
    request = await server.prepare(http, lambda: check_request(translate()))
    _, info = server.ready(request.model)
    assert isinstance(request.prompt, Chat)
    return len(await render(http, request, request.prompt, info))


async def render(http: Request, request: GenerationRequest, chat: Chat, info: EngineInfo) -> list[int]:
    """The tokens of a conversation, up to where the answer begins. Raises ApiError."""
    server = server_of(http)
    rendered = await server.prepare(http, lambda: rendering(request, chat, info))
    try:
        return await server.tokenize(rendered)
    except ChatTemplateError as error:
        raise bad_parameter(request.client_name("messages"), str(error)) from None


def rendering(request: GenerationRequest, chat: Chat, info: EngineInfo) -> Callable[[], list[int]]:
    """A function that renders the prompt, for the tokenizer's thread. Raises ApiError."""
    check_template(request, chat, info)
    options = {**chat.chat_template_kwargs, **thinking_switch(request, chat, info)}
    tools = [tool.for_template() for tool in chat.offered_tools]
    num_chars = sum(len(message["content"]) for message in chat.messages) + sum(len(json.dumps(tool)) for tool in tools)
    check_text_length(request.client_name("messages"), num_chars, info)
    if tools:
        options["tools"] = tools
    if chat.continue_final_message:
        options["continue_final_message"] = True
    opens_answer = chat.add_generation_prompt
    if opens_answer is None:
        opens_answer = not chat.continue_final_message
    return lambda: info.tokenizer.apply_chat_template(chat.messages, opens_answer, **options)


async def encode(server: Server, request: GenerationRequest, info: EngineInfo) -> tuple[list[list[int]], list[str]]:
    """The tokens of prompts that are not conversations, and, if the answers begin with them, their texts."""
    prompts = request.prompt
    assert isinstance(prompts, list)
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
    check_text_length(request.client_name("prompt"), longest, info)

    def work() -> tuple[list[list[int]], list[str]]:
        tokens = [info.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]
        if not request.echo:
            return tokens, []
        return tokens, [each if isinstance(each, str) else info.tokenizer.decode(each) for each in prompts]

    return await server.tokenize(work)


def thinking_of(info: EngineInfo, chat: Chat, prompt: list[int]) -> Thinking:
    """Whether the prompt ends inside a think block, or the model may open one."""
    tags = info.tokenizer.tags
    if not tags.think_start:
        return "never"
    if chat.continue_final_message:
        last = str(chat.messages[-1]["content"])
        return "open" if last.rfind(tags.think_start) > last.rfind(tags.think_end) else "never"
    if info.tokenizer.ends_with(prompt, tags.think_start):
        return "open"
    return "never" if info.tokenizer.ends_with(prompt, tags.think_end) else "may"
