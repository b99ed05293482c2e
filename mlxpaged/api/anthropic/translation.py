"""Translates a request of the Messages API into the neutral request for text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from mlxpaged.api.anthropic import schema
from mlxpaged.api.anthropic.signature import unseal
from mlxpaged.api.generation.request import Chat, GenerationRequest, Tool, ToolChoice, function_call, sampling_params
from mlxpaged.api.media import MediaPart, joined, media_of
from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.models.text.tokenizer import Tokenizer

Mode = Literal["none", "auto", "required"]
CHOICES: dict[str, Mode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
TIERS = {"auto": "auto", "standard_only": "default"}
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
"""Whether the thinking is turned on or off. Any other leaves it to the chat template."""
ERROR = "Error: "
"""This precedes a tool's result that is an error: chat templates have no place for `is_error`."""
EFFORT_TOKENS = {"low": 1024, "medium": 4096}
"""Limits of the thinking in tokens, by output_config.effort. Higher efforts set no limit."""
BILLING = "x-anthropic-billing-header:"
"""Claude Code's first system text begins with this. It is a header for Anthropic that depends on the first question. In
the prompt, it would keep conversations from sharing the prefix that follows it."""

CLIENT_NAMES = {"parameters": "input_schema"}


def translate(body: schema.CountTokensRequest, tokenizer: Tokenizer) -> GenerationRequest:
    choice = body.tool_choice
    thinking = body.thinking
    form = body.output_config and body.output_config.format
    chat = Chat(
        messages=messages_of(body),
        media=media_of(body.messages, "messages"),
        tools=[
            Tool(tool.name, tool.description, tool.input_schema, tool.strict, f"tools.{index}")
            for index, tool in body.offered_tools()
        ],
        tool_choice=ToolChoice() if choice is None else ToolChoice(CHOICES[choice.type], getattr(choice, "name", None)),
        one_call=bool(getattr(choice, "disable_parallel_tool_use", None)),
        enable_thinking=None if thinking is None else THINKS.get(thinking.type),
        asks_thinking=isinstance(thinking, schema.ThinkingEnabled),
        effort=effort_of(body, tokenizer),
        # Anthropic's API continues the last message if it is the assistant's.
        continue_final_message=isinstance(body.messages[-1], schema.AssistantMessage),
    )
    answered = body if isinstance(body, schema.MessagesRequest) else None
    params = sampling_params(
        body,
        stop=tuple(answered.stop_sequences or ()) if answered else (),
        thinking_budget=thinking_budget(body, effort_of(body, tokenizer)),
        constraint=form and Constraint("json_schema", json.dumps(form.schema_), "output_config.format.schema"),
    )
    tier = TIERS[answered.service_tier] if answered and answered.service_tier else None
    return GenerationRequest.of(body, prompt=chat, params=params, service_tier=tier, client_names=CLIENT_NAMES)


def effort_of(body: schema.CountTokensRequest, tokenizer: Tokenizer) -> str | None:
    """Returns the effort of the thinking. Clients send one to every model; models that do not think ignore it."""
    thinks = tokenizer.tags.thinks and not isinstance(body.thinking, schema.ThinkingDisabled)
    return body.output_config.effort if thinks and body.output_config is not None else None


def thinking_budget(body: schema.CountTokensRequest, effort: str | None) -> int | None:
    """Returns the limit of the thinking."""
    limits = [EFFORT_TOKENS.get(effort or "high"), getattr(body.thinking, "budget_tokens", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def messages_of(body: schema.CountTokensRequest) -> list[dict[str, Any]]:
    """Returns the messages for the chat template."""
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        messages.append({"role": "system", "content": system_text(body.system)})
    for message in body.messages:
        if isinstance(message, schema.UserMessage):
            add_user(messages, message.content)
        elif isinstance(message, schema.SystemMessage):
            messages.append({"role": "system", "content": text_of(message.content)})
        else:
            messages.append(assistant(message))
    for said in messages:
        if said["role"] == "user":
            said["content"] = joined(said["content"])
    return messages


def text_of(
    content: str | Iterable[schema.TextBlock | schema.ToolReference | schema.ToolsBlock | MediaPart] | None,
) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return joined(
        [
            f"The tool {block.tool_name} can be called now." if isinstance(block, schema.ToolReference) else block.text
            for block in content
            if not isinstance(block, schema.ToolsBlock)
        ]
    )


def system_text(system: str | list[schema.TextBlock]) -> str:
    return system if isinstance(system, str) else text_of(b for b in system if not b.text.startswith(BILLING))


def add_user(messages: list[dict[str, Any]], content: str | Sequence[schema.UserBlock]) -> None:
    """Add results as messages of their tools. Texts that follow each other, also of several messages, are joined.
    Until then a message is a list of texts: appending half a million strings one by one takes seconds. A message
    without blocks has an empty text: without it, a conversation could have no message at all."""
    blocks = [schema.TextBlock(type="text", text=content)] if isinstance(content, str) else content
    for block in blocks or [schema.TextBlock(type="text", text="")]:
        if isinstance(block, schema.ToolResultBlock):
            text = (ERROR if block.is_error else "") + text_of(block.content)
            messages.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        elif isinstance(block, schema.ToolsBlock):
            continue
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(block.text)
        else:
            messages.append({"role": "user", "content": [block.text]})


def assistant(message: schema.AssistantMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    texts: list[schema.TextBlock | MediaPart] = []
    calls, thoughts = [], []
    for block in message.content:
        match block:
            case schema.TextBlock() | MediaPart():
                texts.append(block)
            case schema.ToolUseBlock():
                calls.append(function_call(block.id, block.name, block.input))
            case schema.ThinkingBlock():
                thoughts.append(block.thinking or unseal(block.signature))
    said: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    if calls:
        said["tool_calls"] = calls
    if any(thoughts):
        said["reasoning_content"] = "\n".join(filter(None, thoughts))
    return said
