"""Collects what a grammar enforces in an answer: the calls that `tool_choice` requires, arguments that fit the schemas
of strict tools, and text of a given form. Thinking comes first, and nothing constrains it."""

from __future__ import annotations

import json

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.request import Chat, GenerationRequest, Tool
from mlxpaged.engine import Constraint, StructuredOutput, Thinking, ToolCallForm
from mlxpaged.formats import Format
from mlxpaged.models import Tags

AROUND_ARGUMENTS = {"json_tools": ('\n{{"name": "{}", "arguments": ', "}\n"), "mistral": ("{}[ARGS]", "")}
"""By format, the text between a call's opening tag and its arguments, with the name in it, and the text between the
arguments and the closing tag. Only these formats can be enforced: in others, arguments are not JSON."""

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool without parameters, as OpenAI defines it."""


def structured_output(
    request: GenerationRequest, chat: Chat, tags: Tags, thinking: Thinking
) -> StructuredOutput | None:
    """Returns None if there is nothing to enforce. Raises ApiError for what cannot be enforced.

    Required calls, and the calls of strict tools, fit the tool's schema. The arguments of other calls are any object.
    """
    text = request.params.constraint
    assert not isinstance(text, StructuredOutput)
    tools, choice = chat.offered_tools, chat.tool_choice
    required = choice.mode == "required"
    strict = any(tool.strict for tool in tools)
    if not (required or strict or text):
        return None
    calls: tuple[ToolCallForm, ...] = ()
    param = request.client_name("tool_choice" if required else "tools")
    if text and not (required or strict):
        param = text.param
    if tools:
        if tags.tools.name not in AROUND_ARGUMENTS:
            known = " and ".join(AROUND_ARGUMENTS)
            message = f"tool calls in this model's format, {tags.tools.name}, cannot be enforced; only {known} can"
            raise bad_parameter(param, message)
        calls = tuple(
            call_form(tags.tools, tool, enforced=required or bool(tool.strict))
            for tool in tools
            if choice.named in (None, tool.name)
        )
    return StructuredOutput(
        thinking=thinking,
        think_start=tags.think_start,
        think_end=tags.think_end,
        text=None if required else text or "free",
        call_start=tags.tools.starts[0],
        calls=calls,
        one_call=choice.named is not None or chat.one_call,
        param=param,
    )


def call_form(form: Format, tool: Tool, enforced: bool) -> ToolCallForm:
    before, after = AROUND_ARGUMENTS[form.name]
    schema = NO_ARGUMENTS if tool.parameters is None else tool.parameters
    given = schema.get("type", "object")
    if enforced and given != "object":
        raise bad_parameter(tool.param, f"the type of the parameters must be 'object', got {given!r}")
    schema = {**schema, "type": "object"} if enforced else {"type": "object"}
    arguments = Constraint("json_schema", json.dumps(schema), tool.param)
    return ToolCallForm(before.format(tool.name), arguments, "".join((after, *form.ends)))
