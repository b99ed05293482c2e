"""Tools in request bodies: their definitions, the choice among them, and calls that were made."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlxpaged.api.openai.body import Body, one_of

MAX_TOOLS = 1024

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: ToolName


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """mode: what the model may do with them, as tool_choice says it of all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("[function]")] | Annotated[AllowedChoice, Tag("[allowed_tools]")],
        one_of("type", "function and allowed_tools"),
    ]
)


class CalledFunction(Body):
    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Templates write arguments as JSON themselves. What is not a JSON object stays the text that it is."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class Call(Body):
    """index: of a call that was put together from a stream; the order says it too."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template()}
