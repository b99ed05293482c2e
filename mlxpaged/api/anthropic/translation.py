"""A request of the Messages API as the chat request that asks for the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from mlxpaged.api.anthropic.events import unseal
from mlxpaged.api.anthropic.schema import (
    AssistantMessage,
    CountTokensRequest,
    MessagesRequest,
    NamedChoice,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolReference,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from mlxpaged.api.errors import ApiError, bad_parameter, from_validation
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.models import Tokenizer
from mlxpaged.scheduler import PromptTooLongError

CHAT_SCHEMA = "response_format.json_schema.schema"
OWN_SCHEMA = "output_config.format.schema"
"""One field, as chat calls it and as this API does."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TIERS = {"auto": "auto", "standard_only": "default"}
ERROR = "Error: "
"""Before a tool's result that is one: chat templates have no other place for `is_error`."""
EFFORT_TOKENS = {"low": 1024, "medium": 4096}
"""The most that a model thinks, by output_config.effort; more effort is any number, as without the field."""
BILLING = "x-anthropic-billing-header:"
"""How Claude Code's first system text begins. It is a header for Anthropic that depends on the first question: not for
the model, and in the prompt it would keep conversations from sharing what follows."""


def chat_request(body: CountTokensRequest, tokenizer: Tokenizer) -> ChatRequest:
    """Raises ApiError for thinking that the model does not do, or cannot be kept from."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": system_text(body.system)})
    for message in body.messages:
        if isinstance(message, UserMessage):
            add_user(messages, message)
        elif isinstance(message, SystemMessage):
            add_system(messages, message, tokenizer)
        else:
            messages.append(assistant(message))
    for said in messages:
        if said["role"] == "user":
            said["content"] = "\n".join(said["content"])
    choice = body.tool_choice
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        # As Anthropic defines it: the answer goes on where the assistant's last message ends.
        "continue_final_message": isinstance(body.messages[-1], AssistantMessage) or None,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.offered_tools()
        ],
        **thinking(body, tokenizer),
    }
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = CHOICES[choice.type]
    if getattr(choice, "disable_parallel_tool_use", None):
        fields["parallel_tool_calls"] = False
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "service_tier": TIERS[body.service_tier] if body.service_tier else None,
        }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:  # more messages than a conversation may have, once results have their own
        raise from_validation(error) from None


@contextlib.contextmanager
def own_words(body: CountTokensRequest) -> Iterator[None]:
    """Errors of the chat request in this API's names, and, of a prompt that is too long, in Anthropic's very words:
    clients read the numbers there, and come back with a smaller `max_tokens` or a shorter conversation."""
    try:
        yield
    except ApiError as error:
        raise restated(error, body) from None


def restated(error: ApiError, body: CountTokensRequest) -> ApiError:
    cause = error.__cause__
    if isinstance(cause, PromptTooLongError):
        prompt, most = cause.num_prompt_tokens, cause.limit
        if cause.max_tokens is not None and prompt < most:
            wanted = f"input length and `max_tokens` exceed context limit: {prompt} + {cause.max_tokens} > {most}"
            return bad_parameter("max_tokens", f"{wanted}, decrease input length or `max_tokens` and try again")
        return ApiError(400, f"prompt is too long: {prompt} tokens > {most} maximum", param="messages")
    if error.param is None:
        return error
    name = own_name(error.param, body)
    message = error.message.replace(error.param, name, 1)
    return ApiError(error.status, message, error.kind, name, error.code, error.headers)


def own_name(param: str, body: CountTokensRequest) -> str:
    """Of a chat request's field. Its tools are without the deferred ones."""
    if param.startswith(CHAT_SCHEMA):
        return OWN_SCHEMA + param.removeprefix(CHAT_SCHEMA)
    field, _, rest = param.partition(".")
    number, _, rest = rest.partition(".")
    if field != "tools" or not number:
        return param
    index = (body.tools or []).index(body.offered_tools()[int(number)])
    return f"tools.{index}"


def text_of(content: str | Iterable[TextBlock | ToolReference] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        block.text if isinstance(block, TextBlock) else f"The tool {block.tool_name} can be called now."
        for block in content
    )


def system_text(system: str | list[TextBlock]) -> str:
    return system if isinstance(system, str) else text_of(b for b in system if not b.text.startswith(BILLING))


def add_system(messages: list[dict[str, Any]], message: SystemMessage, tokenizer: Tokenizer) -> None:
    """As it is, where the chat template has system messages behind the first message; else in the user's words."""
    text = text_of(message.content)
    if tokenizer.takes_late_system:
        messages.append({"role": "system", "content": text})
    else:
        add_user(messages, UserMessage(role="user", content=f"<system>\n{text}\n</system>"))


def add_user(messages: list[dict[str, Any]], message: UserMessage) -> None:
    """Results become messages of their tools; texts that follow each other, also over several messages, one. Those of
    a user are left as a list: half a million that are appended one by one take seconds."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = (ERROR if block.is_error else "") + text_of(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(block.text)
        else:
            messages.append({"role": "user", "content": [block.text]})


def assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [
        block.thinking or unseal(block.signature) for block in message.content if isinstance(block, ThinkingBlock)
    ]
    return {
        "role": "assistant",
        "content": text_of(block for block in message.content if isinstance(block, TextBlock)),
        "reasoning_content": "\n".join(filter(None, thoughts)) or None,
        "tool_calls": calls or None,
    }


def thinking(body: CountTokensRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a chat request that say whether, and how long, the model thinks."""
    asked = body.thinking
    effort = None if body.output_config is None else EFFORT_TOKENS.get(body.output_config.effort or "high")
    thinks, switchable = bool(tokenizer.tags.think_start), tokenizer.template_reads("enable_thinking")
    if isinstance(asked, ThinkingEnabled) and not thinks:
        raise bad_parameter("thinking", "this model does not think, as far as its vocabulary shows")
    if isinstance(asked, ThinkingDisabled) and thinks and not switchable:
        raise bad_parameter("thinking", "this model's chat template has no enable_thinking to keep it from thinking")
    enabled = not isinstance(asked, ThinkingDisabled)
    switch = {"chat_template_kwargs": {"enable_thinking": enabled}} if asked and thinks and switchable else {}
    # Effort has nothing to limit where the model does not think; clients send it to every model.
    limits = [effort if thinks and enabled else None, getattr(asked, "budget_tokens", None)]
    budget = min((limit for limit in limits if limit is not None), default=None)
    return switch | {"thinking_budget": budget}
