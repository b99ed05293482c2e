"""Tools in request bodies: their definitions, the choice among them, and calls that were made."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.openai.body import Body

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
