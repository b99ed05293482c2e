"""Collects what a grammar enforces in an answer: the calls that `tool_choice` requires, arguments that fit the schemas
of strict tools, and text of a given form. Thinking comes first, and nothing constrains it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection
from typing import Any

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.request import Chat, GenerationRequest, Tool
from mlxpaged.core.engine.constraint import Constraint, StructuredOutput, Thinking, ToolCallForm
from mlxpaged.formats import HARMONY, Format, harmony
from mlxpaged.formats.pieces import InexpressibleError
from mlxpaged.formats.schemas import closed
from mlxpaged.models.text.tokenizer import Tags
from mlxpaged.parts.grammar.loosening import COUNTS, check_enforced, loosened


def structured_output(
    request: GenerationRequest, chat: Chat, tags: Tags, thinking: Thinking, loose: Collection[str] = ()
) -> StructuredOutput | None:
    """Returns None if there is nothing to enforce. Raises ApiError for what cannot be enforced. loose: the fields of
    tools whose schema is not enforced.

    Required calls, and the calls of strict tools, fit the tool's schema. The arguments of other calls are any object.
    """
    text = request.params.constraint
    assert not isinstance(text, StructuredOutput)
    tools, choice = chat.offered_tools, chat.tool_choice
    required = choice.mode == "required"
    held = {tool.param for tool in tools if required or tool.strict}.difference(loose)
    strict = any(tool.strict and tool.param in held for tool in tools)
    if not (required or strict or text):
        return None
    calls: tuple[ToolCallForm, ...] = ()
    param = request.client_name("tool_choice" if required else "tools")
    if text and not (required or strict):
        param = text.param
    if tools:
        calls = tuple(
            call_form(tags.tools, tool, enforced=tool.param in held, param=param)
            for tool in tools
            if choice.named in (None, tool.name)
        )
    in_messages = tags.tools is HARMONY
    return StructuredOutput(
        thinking="may" if in_messages else thinking,
        think_start=harmony.BEGIN_THOUGHT if in_messages else tags.think_start,
        think_end=harmony.END_THOUGHT if in_messages else tags.think_end,
        text=None if required else text or "free",
        text_start=tags.tools.begin_text,
        call_start=tags.tools.call_start,
        calls=calls,
        one_call=choice.named is not None or chat.one_call,
        param=param,
    )


def with_loose_text(request: GenerationRequest) -> tuple[GenerationRequest, list[str]]:
    """Returns the request without what cannot be enforced in the schema of its text, and the fields that are left out.
    A strict schema stays."""
    text = request.params.constraint
    if not isinstance(text, Constraint) or text.is_strict is not False:
        return request, []
    schema, keywords = loosened(json.loads(text.text))
    if keywords:
        text = dataclasses.replace(text, text=json.dumps(schema))
        request = dataclasses.replace(request, params=dataclasses.replace(request.params, constraint=text))
    return request, [f"{text.param}.{keyword}" for keyword in keywords]


def with_loose_tools(request: GenerationRequest, chat: Chat, form: Format) -> tuple[Chat, list[str]]:
    """Does the same with the tools whose schema is enforced although the request does not insist on it: those that are
    not strict of required calls, and strict ones of others. form: the format of the calls."""
    choice, tools, fields = chat.tool_choice, [], dict[str, None]()
    required, offered = choice.mode == "required", {tool.param for tool in chat.offered_tools}
    for tool in chat.tools:
        enforced = tool.param in offered and bool(tool.strict) != required and choice.named in (None, tool.name)
        if tool.parameters is not None and enforced:
            schema, keywords = loosened(tool.parameters)
            schema, counts = without_counts(form, tool.name, schema)
            fields |= dict.fromkeys(f"{parameters_of(request, tool)}.{keyword}" for keyword in (*keywords, *counts))
            tool = dataclasses.replace(tool, parameters=schema)
        tools.append(tool)
    return dataclasses.replace(chat, tools=tools), list(fields)


def without_counts(form: Format, name: str, schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the schema of a tool without limits for the number of its arguments, if calls can be written only without
    them, and the keywords that are left out."""
    counts = sorted(COUNTS & schema.keys())
    if counts and form.written is not None and not is_written(form, name, schema):
        less = {key: value for key, value in schema.items() if key not in COUNTS}
        if is_written(form, name, less):
            return less, counts
    return schema, []


def is_written(form: Format, name: str, schema: dict[str, Any]) -> bool:
    """Whether calls of a tool can be enforced in a format."""
    try:
        form.pieces(name, closed({**schema, "type": "object"}))
    except InexpressibleError:
        return False
    return True


def parameters_of(request: GenerationRequest, tool: Tool) -> str:
    """Returns the field of a tool's schema, without numbers."""
    return re.sub(r"\.[0-9]+", "", f"{tool.param}.{request.client_name('parameters')}")


def call_form(form: Format, tool: Tool, enforced: bool, param: str) -> ToolCallForm:
    """Raises ApiError, for a format whose calls cannot be enforced with the field `param`."""
    if form.written is None:
        raise bad_parameter(param, f"tool calls in this model's format, {form.name}, cannot be enforced")
    schema = tool.schema
    given = schema.get("type", "object")
    if enforced and given != "object":
        raise bad_parameter(tool.param, f"the type of the parameters must be 'object', got {given!r}")
    if enforced:
        try:
            check_enforced({key: schema[key] for key in schema if key not in ("$defs", "definitions")}, schema)
        except ValueError as error:
            raise bad_parameter(tool.param, str(error), "unsupported_constraint") from None
    try:
        pieces = form.pieces(tool.name, closed({**schema, "type": "object"}) if enforced else None)
    except InexpressibleError as error:
        reason = f"calls of {tool.name!r} cannot be enforced in this model's format, {form.name}: {error}"
        raise bad_parameter(tool.param, reason) from None
    return ToolCallForm(pieces, tool.param)
