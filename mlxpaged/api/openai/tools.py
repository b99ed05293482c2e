"""Defines what request bodies have about tools: definitions, the choice among them, and calls that were made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.generation import request
from mlxpaged.api.schema import MAX_TOOLS, Body, OneOf, ToolName


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def translated(self, param: str) -> request.Tool:
        return request.Tool(self.name, self.description, self.parameters, self.strict, param)


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """mode: has the same meaning as in tool_choice, but for these tools only."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, OneOf("type")]


def translated_choice(choice: ToolChoice | None) -> request.ToolChoice:
    match choice:
        case NamedTool():
            return request.ToolChoice("required", named=choice.function.name)
        case AllowedChoice(allowed_tools=allowed):
            return request.ToolChoice(allowed.mode, allowed=[tool.function.name for tool in allowed.tools])
    return request.ToolChoice(choice or "auto")


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Body):
    """index: the list's order says the same. Clients that collected the call from a stream send it."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return request.function_call(self.id, self.function.name, request.parsed(self.function.arguments))
