"""Translates a request of the responses API into the neutral request for text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.request import INPUT, Chat, GenerationRequest, Tool, function_call, parsed, sampling_params
from mlxpaged.api.media import media_of
from mlxpaged.api.openai.responses import schema
from mlxpaged.api.openai.responses.tools import full_name, functions, translated_choice
from mlxpaged.api.openai.thinking import EFFORT_TOKENS

MAX_RESPONSE_LOGPROBS = 100_000
"""Those of a response are in its last four events, and in what is stored: one takes 500 bytes."""

CLIENT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "include",
    "thinking": "reasoning.effort",
}


def translate(body: schema.InputTokensRequest, items: Sequence[schema.Item]) -> GenerationRequest:
    """items: the whole conversation; the instructions are not part of it. Raises ApiError."""
    messages = messages_of(body.instructions, items)
    if not any(message["role"] != "system" for message in messages) and all(map(is_unread, items)):
        raise bad_parameter("input", "has nothing that the model can be shown; send messages, or results of tools")
    effort = body.reasoning.effort if body.reasoning is not None else None
    form = body.text.format if body.text is not None else None
    chat = Chat(
        messages=messages,
        media=media_of(items, "input", len(items) - len(body.items)),
        tools=[tool for tool, _ in offered(body, items)],
        tool_choice=translated_choice(body.tool_choice),
        one_call=body.parallel_tool_calls is False,
        enable_thinking=False if effort == "none" else None,
        effort=effort,
    )
    answered = body if isinstance(body, schema.ResponseRequest) else None
    params = sampling_params(
        body,
        max_tokens=answered and answered.max_output_tokens,
        logprobs=(answered.top_logprobs or 0) if answered and answered.wants_logprobs else None,
        thinking_budget=None if effort is None else EFFORT_TOKENS[effort],
        constraint=form and form.constraint("text.format"),
    )
    return GenerationRequest.of(
        body, prompt=chat, params=params, most_logprobs=MAX_RESPONSE_LOGPROBS, client_names=CLIENT_NAMES
    )


def offered(body: schema.InputTokensRequest, items: Sequence[schema.Item]) -> Iterator[tuple[Tool, dict[str, str]]]:
    """Yields the tools of a request as `functions` does, and then those that items have added. Of several with a name,
    the first counts."""
    num_earlier = len(items) - len(body.items)
    names = set[str]()
    given = [("tools", body.tools)]
    given += [
        (f"input.{i - num_earlier}.tools", item.tools)
        for i, item in enumerate(items)
        if isinstance(item, schema.ToolsItem)
    ]
    for place, tools in given:
        found = [each for each in functions(tools, place) if place == "tools" or each[0].name not in names]
        names.update(tool.name for tool, _ in found)
        yield from found


def messages_of(instructions: str | None, items: Sequence[schema.Item]) -> list[dict[str, Any]]:
    """Returns the messages for the chat template.

    The thinking, text and calls of one answer become one message. A text after calls that have no results is the next
    answer. The instructions and the system messages that follow them become one system message: most templates accept
    only one, at the beginning.
    """
    answered = {item.call_id for item in items if isinstance(item, schema.ResultItem)}
    system = [] if instructions is None else [instructions]
    messages: list[dict[str, Any]] = []
    before: schema.Item | None = None
    called = set[str]()
    for item in items:
        if isinstance(item, schema.ResultItem) and item.call_id not in called:  # of a call that is shown as text
            messages.append({"role": "user", "content": f"[{item.type}]\n{schema.text_of(item.output)}"})
        elif isinstance(item, schema.ResultItem):
            messages.append({"role": "tool", "content": schema.text_of(item.output), "tool_call_id": item.call_id})
        elif isinstance(item, schema.OtherItem) and item.is_result and item.text is not None:
            messages.append({"role": "user", "content": item.text})
        elif isinstance(item, schema.MessageItem) and item.role != "assistant":
            text = schema.text_of(item.content)
            if item.role != "user" and not messages:
                system.append(text)
            else:
                messages.append({"role": "user" if item.role == "user" else "system", "content": text})
        elif not is_unread(item):
            continues = continues_answer(before, item) and messages and messages[-1]["role"] == "assistant"
            if continues and not isinstance(item, schema.CallItem):
                calls = messages[-1].get("tool_calls", ())
                continues = not calls or any(call["id"] in answered for call in calls)
            if not continues:
                messages.append({"role": "assistant", "content": []})
            add_to_answer(messages[-1], item)
        if isinstance(item, schema.CallItem):
            called.add(item.call_id)
        before = item
    for message in messages:
        if message["role"] == "assistant":
            message["content"] = "".join(message["content"])
            if thoughts := message.pop("reasoning_content", None):
                message["reasoning_content"] = "\n".join(thoughts)
    return [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages


def is_unread(item: schema.Item) -> bool:
    """Whether the model is shown nothing of an item."""
    return isinstance(item, schema.ToolsItem) or (
        isinstance(item, schema.OtherItem | schema.ReasoningItem) and not item.text
    )


def continues_answer(before: schema.Item | None, item: schema.Item) -> bool:
    """Whether an assistant's item belongs to the same answer as the item before it."""
    if isinstance(before, schema.MessageItem):
        return before.role == "assistant" and not isinstance(item, schema.MessageItem)
    return isinstance(before, schema.CallItem | schema.ReasoningItem | schema.ToolsItem | schema.OtherItem)


def add_to_answer(message: dict[str, Any], item: schema.Item) -> None:
    """Adds an item to a message, whose content and reasoning_content are lists until the answer is complete."""
    match item:
        case schema.ReasoningItem():
            thoughts = message.setdefault("reasoning_content", [])
            if thoughts or item.text:
                thoughts.append(item.text)
        case schema.FunctionCall():
            call = function_call(item.call_id, full_name(item.namespace, item.name), parsed(item.arguments))
            message.setdefault("tool_calls", []).append(call)
        case schema.CustomToolCall():
            call = function_call(item.call_id, item.name, {INPUT: item.input})
            message.setdefault("tool_calls", []).append(call)
        case schema.OtherItem():
            is_apart = not message["content"] or message["content"][-1].endswith("\n")
            message["content"].append(f"{'' if is_apart else chr(10)}{item.text}\n")
        case schema.MessageItem():
            message["content"].append(schema.text_of(item.content))


def check_calls(earlier: Sequence[schema.Item], items: Sequence[schema.Item]) -> None:
    """Raises ApiError for a result without a call before it, unless the call may be an item that this server does not
    have. items: those of the request."""
    called: set[str | None] = {item.call_id for item in earlier if isinstance(item, schema.CallItem | schema.OtherItem)}
    lost = any(map(is_lost, earlier))
    for i, item in enumerate(items):
        lost = lost or is_lost(item)
        if isinstance(item, schema.CallItem | schema.OtherItem):
            called.add(item.call_id)
        elif isinstance(item, schema.ResultItem) and item.call_id not in called and not lost:
            kind = item.type.removesuffix("_output")
            raise bad_parameter(f"input.{i}.call_id", f"no {kind} before this item has the id {item.call_id!r}")


def is_lost(item: schema.Item) -> bool:
    """Whether an item refers to one that this server does not have."""
    return isinstance(item, schema.OtherItem) and item.type == schema.REFERENCE
