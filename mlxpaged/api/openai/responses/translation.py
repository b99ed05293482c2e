"""A request of the responses API as the chat request that asks for the same, and errors with its own names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from mlxpaged.api.errors import ApiError, bad_parameter, from_validation
from mlxpaged.api.openai.responses.items import (
    FunctionCall,
    FunctionCallOutput,
    Item,
    MessageItem,
    ReasoningItem,
    text_of,
)
from mlxpaged.api.openai.responses.schema import InputTokensRequest, ResponseRequest, SchemaFormat
from mlxpaged.api.openai.responses.tools import chat_choice, chat_tools, full_name, functions
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.models.tokenizer import ChatTemplateError

OWN_NAMES = (
    (r"messages\b.*", "input"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"logprobs", "include"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"response_format(\.json_schema)?", "text.format"),
)
"""Beginnings of a chat request's fields, and what they are called here."""


def chat_request(body: InputTokensRequest, items: Sequence[Item]) -> ChatRequest:
    """items: the whole conversation but for the instructions, which are not part of it. Raises ValidationError or
    ApiError, both with a chat request's names."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages_of(body.instructions, items),
        "tools": chat_tools(body.tools),
        "tool_choice": chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "response_format": response_format(body),
    }
    if isinstance(body, ResponseRequest):
        fields |= {
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": body.wants_logprobs or None,
            "top_logprobs": body.top_logprobs,
            "service_tier": body.service_tier,
            "timeout": body.timeout,
            "ttft_timeout": body.ttft_timeout,
        }
    return ChatRequest.model_validate(fields)


def response_format(body: InputTokensRequest) -> dict[str, Any] | None:
    asked = body.text.format if body.text is not None else None
    if isinstance(asked, SchemaFormat):
        schema = asked.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return None if asked is None else {"type": asked.type}


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """What an assistant thought, said and called in one go is one message, as chat templates have it.

    So are the instructions and the system messages that follow them: most templates know one, at the beginning.
    """
    system = [] if instructions is None else [instructions]
    messages: list[dict[str, Any]] = []
    before: Item | None = None
    for item in items:
        if isinstance(item, FunctionCallOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            text = text_of(item.content)
            if item.role != "user" and not messages:
                system.append(text)
            else:
                messages.append({"role": "user" if item.role == "user" else "system", "content": text})
        else:
            if not goes_on(before, item):
                messages.append({"role": "assistant", "content": []})
            add_to_answer(messages[-1], item)
        before = item
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "".join(message["content"])
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"]) or None
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def goes_on(before: Item | None, item: Item) -> bool:
    """Whether an assistant's item belongs to the answer that the one before it is of."""
    if isinstance(before, MessageItem):
        return before.role == "assistant" and not isinstance(item, MessageItem)
    return isinstance(before, (FunctionCall, ReasoningItem))


def add_to_answer(message: dict[str, Any], item: Item) -> None:
    """content and reasoning_content are lists of their parts until the answer is complete."""
    match item:
        case ReasoningItem():
            thoughts = message.setdefault("reasoning_content", [])
            if thoughts or item.text:
                thoughts.append(item.text)
        case FunctionCall():
            function = {"name": full_name(item.namespace, item.name), "arguments": item.arguments}
            message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case MessageItem():
            message["content"].append(text_of(item.content))


def check_calls(earlier: Sequence[Item], items: Sequence[Item]) -> None:
    """Raises ApiError for a result that is none of a call before it. items: those of the request."""
    called = {item.call_id for item in earlier if isinstance(item, FunctionCall)}
    for i, item in enumerate(items):
        if isinstance(item, FunctionCall):
            called.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in called:
            raise bad_parameter(f"input.{i}.call_id", f"no function_call before this item has the id {item.call_id!r}")


@contextlib.contextmanager
def own_names(body: InputTokensRequest) -> Iterator[None]:
    """What is raised about a field of its chat request names the field of the responses API instead."""
    try:
        yield
    except ChatTemplateError as error:
        raise bad_parameter("input", str(error)) from None
    except ValidationError as error:
        raise renamed(from_validation(error), body) from None
    except ApiError as error:
        raise renamed(error, body) from None


def renamed(error: ApiError, body: InputTokensRequest) -> ApiError:
    if error.param is None:
        return error
    param = error.param
    tools = [each.param for each in functions(body.tools)]
    param = re.sub(r"\Atools\.(\d+)(\.function)?(?=\.|\Z)", lambda match: tools[int(match[1])], param)
    for pattern, name in OWN_NAMES:
        param = re.sub(rf"\A{pattern}(?=\.|\Z)", name, param)
    message = (
        param + error.message.removeprefix(error.param) if error.message.startswith(error.param) else error.message
    )
    return ApiError(error.status, message, error.kind, param, error.code, error.headers)
