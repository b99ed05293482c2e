"""What a request demands of its answer that only a grammar can promise: calls where `tool_choice` wants them, arguments
that fit the schemas of strict tools, structured output; all of it behind the thinking, which is free."""

from __future__ import annotations

import json

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.openai.tools import Tool
from mlxpaged.api.tool_calls import AROUND_ARGUMENTS
from mlxpaged.engine import Constraint, StructuredOutput, Thinking, ToolCallForm
from mlxpaged.models import Tags, ToolFormat

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a tool without parameters takes, as OpenAI defines it."""


def answer_form(body: ChatRequest, tags: Tags, thinking: Thinking) -> StructuredOutput | None:
    """None where any text will do. Raises ApiError for what cannot be promised.

    Every call that is demanded fits its tool's schema. Of those that the model may make or not, the calls of strict
    tools do; others have any JSON object.
    """
    demands_call = body.names_tool or body.chosen_tool == "required"
    strict = any(tool["function"].get("strict") for tool in body.offered_tools)
    text = body.constraint()
    if not (demands_call or strict or text):
        return None
    calls: tuple[ToolCallForm, ...] = ()
    param = "tool_choice" if demands_call else text.param if text and not strict else "tools"
    if body.offered_tools and tags.tools is not None:
        if tags.tools.name not in AROUND_ARGUMENTS:
            known = " and ".join(AROUND_ARGUMENTS)
            message = f"calls in this model's format, {tags.tools.name}, cannot be enforced; those in {known} can"
            raise bad_parameter(param, message)
        calls = tuple(
            call_form(tags.tools, tool, f"tools.{i}", enforced=demands_call or bool(tool.function.strict))
            for i, tool in enumerate(body.tools or ())
            if tool.function.name in body.allowed_names
            if not body.names_tool or body.chosen_tool == tool.function.name
        )
    return StructuredOutput(
        thinking=thinking,
        think_start=tags.think_start,
        think_end=tags.think_end,
        text=None if demands_call else text or "free",
        call_start=tags.tools.start if tags.tools is not None else "",
        calls=calls,
        one_call=body.names_tool or body.parallel_tool_calls is False,
        param=param,
    )


def call_form(form: ToolFormat, tool: Tool, param: str, enforced: bool) -> ToolCallForm:
    before, after = AROUND_ARGUMENTS[form.name]
    schema = NO_ARGUMENTS if tool.function.parameters is None else tool.function.parameters
    given = schema.get("type", "object")
    if enforced and given != "object":
        raise bad_parameter(param, f"arguments are an object; the type of the parameters is {given!r}")
    schema = {**schema, "type": "object"} if enforced else {"type": "object"}
    arguments = Constraint("json_schema", json.dumps(schema), param)
    return ToolCallForm(before.format(tool.function.name), arguments, after + form.end)
