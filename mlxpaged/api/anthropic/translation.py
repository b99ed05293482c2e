"""A request of the Messages API as the chat request that asks for the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from mlxpaged.api.anthropic.schema import (
    AssistantMessage,
    CountTokensRequest,
    MessagesRequest,
    NamedChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from mlxpaged.api.errors import bad_parameter, from_validation
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.models import Tokenizer

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
TIERS = {"auto": "auto", "standard_only": "default"}
ERROR = "Error: "
"""Before a tool's result that is one: chat templates have no other place for `is_error`."""


def chat_request(body: CountTokensRequest, tokenizer: Tokenizer) -> ChatRequest:
    """Raises ApiError for thinking that the model does not do, or cannot be kept from."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of(body.system)})
    for message in body.messages:
        if isinstance(message, UserMessage):
            add_user(messages, message)
        else:
            messages.append(assistant(message))
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
            for tool in body.tools or ()
        ],
        **thinking(body, tokenizer),
    }
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


def text_of(content: str | Iterable[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def add_user(messages: list[dict[str, Any]], message: UserMessage) -> None:
    """Results become messages of their tools; texts that follow each other, also over several messages, one."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            text = (ERROR if block.is_error else "") + text_of(block.content)
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{block.text}"
        else:
            messages.append({"role": "user", "content": block.text})


def assistant(message: AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    return {
        "role": "assistant",
        "content": text_of(block for block in message.content if isinstance(block, TextBlock)),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def thinking(body: CountTokensRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a chat request that say whether, and how long, the model thinks."""
    asked = body.thinking
    thinks, switchable = bool(tokenizer.tags.think_start), tokenizer.template_reads("enable_thinking")
    if asked is None:
        return {}
    if isinstance(asked, ThinkingEnabled) and not thinks:
        raise bad_parameter("thinking", "this model does not think, as far as its vocabulary shows")
    if isinstance(asked, ThinkingDisabled) and thinks and not switchable:
        raise bad_parameter("thinking", "this model's chat template has no enable_thinking to keep it from thinking")
    enabled = not isinstance(asked, ThinkingDisabled)
    switch = {"chat_template_kwargs": {"enable_thinking": enabled}} if thinks and switchable else {}
    return switch | ({"thinking_budget": asked.budget_tokens} if isinstance(asked, ThinkingEnabled) else {})
