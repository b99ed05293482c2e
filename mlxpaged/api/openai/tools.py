"""Defines what request bodies have about tools: definitions, the choice among them, and calls that were made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from mlxpaged.api.foreign import OtherTool, leave_out, type_name
from mlxpaged.api.generation import request
from mlxpaged.api.schema import MAX_TOOLS, Body, OneOf, ToolName


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def translated(self, param: str) -> request.Tool:
        return request.Tool(self.name, self.description, self.parameters, self.strict, param)


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


Tool = Annotated[FunctionTool | OtherTool, OneOf("type", hidden=("other",))]


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


CallId = Annotated[str, BeforeValidator(lambda given: "" if given is None else given)]
"""Some services give calls no id. A result without one belongs to the first open call."""


class FunctionCall(Body):
    """index: the list's order says the same. Clients that collected the call from a stream send it."""

    id: CallId = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return request.function_call(self.id, self.function.name, request.parsed(self.function.arguments))


class CustomInput(Body):
    name: str
    input: str


class CustomCall(Body):
    """A call of a tool that takes one text. The model sees a call with this text as its only argument."""

    id: CallId = ""
    type: Literal["custom"]
    custom: CustomInput
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return request.function_call(self.id, self.custom.name, {request.INPUT: self.custom.input})


class OtherCall(BaseModel):
    """A call of another provider's tool. The model sees a call with its fields as the arguments."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: CallId = ""
    type: str

    @model_validator(mode="after")
    def _is_named(self, info: ValidationInfo) -> OtherCall:
        leave_out(info, f"messages.tool_calls.{type_name(self.type)}", "it is shown as a call of a function")
        return self

    def for_template(self) -> dict[str, Any]:
        fields = (self.model_extra or {}).get(self.type)
        arguments = dict(fields) if isinstance(fields, dict) else {}
        name = arguments.pop("name", None)
        return request.function_call(self.id, name if isinstance(name, str) else type_name(self.type), arguments)


Call = Annotated[FunctionCall | CustomCall | OtherCall, OneOf("type", default=lambda fields: "function")]
