"""Defines tools in requests of the responses API, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxpaged.api.fields.kinds import IGNORED, RESPONSES_TOOLS
from mlxpaged.api.foreign import OtherTool
from mlxpaged.api.generation import request
from mlxpaged.api.openai.tools import Function, FunctionName
from mlxpaged.api.schema import MAX_TOOLS, Body, OneOf, ToolName

WORDS = {"lark": "Lark's notation", "regex": "the form of a regular expression"}

Half = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,63}$")]
"""The name of a namespace, or of a tool in it. The model sees both as one name, as long as a tool's name may be."""


class FunctionTool(Function):
    """strict: whether its calls must fit the parameters."""

    type: Literal["function"]


class NamespacedTool(FunctionTool):
    name: Half


class NamespaceTool(Body):
    """Functions whose calls name the namespace. description: of all of them."""

    type: Literal["namespace"]
    name: Half
    description: str
    tools: Annotated[list[NamespacedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Body):
    type: Literal["text"]


class GrammarFormat(Body):
    """definition: what the tool's input must be."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(Body):
    """A tool that takes one text, such as a patch. The model sees a function with this text as its only argument."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, OneOf("type")] | None = None

    def translated(self, param: str) -> request.Tool:
        form = self.format if isinstance(self.format, GrammarFormat) else None
        parameters, grammar, described = request.INPUT_SCHEMA, None, self.description
        if form is not None:
            text = f"Its input is a text that this grammar in {WORDS[form.syntax]} accepts:\n{form.definition}"
            described = "\n\n".join(filter(None, (self.description, text)))
            if form.syntax == "lark":
                grammar = form.definition
            else:
                limited = {"type": "string", "pattern": f"^(?:{form.definition})$"}
                parameters = parameters | {"properties": {request.INPUT: limited}}
        return request.Tool(self.name, described, parameters, form is not None, param, grammar)


Tool = Annotated[FunctionTool | NamespaceTool | CustomTool | OtherTool, OneOf("type", hidden=("other",))]


def callable_only(tools: Any) -> Any:
    """Returns the allowed tools without those that the server would have to run, unless there are no others."""
    if not isinstance(tools, list):
        return tools
    found = [tool for tool in tools if not (isinstance(tool, dict) and ignored(tool.get("type")))]
    return found or tools


def ignored(kind: Any) -> bool:
    return RESPONSES_TOOLS.get(kind, IGNORED) is IGNORED if isinstance(kind, str) else False


class NamedTool(FunctionName):
    type: Literal["function", "custom"]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), BeforeValidator(callable_only)]


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, OneOf("type")]


def functions(tools: Sequence[Tool] | None, given: str = "tools") -> Iterator[tuple[request.Tool, dict[str, str]]]:
    """Yields each tool that can be called, under its name for the model, and what its calls have in the API.

    given: the place of the tools."""
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool | CustomTool):
            kind = {"type": "custom_tool_call"} if isinstance(tool, CustomTool) else {}
            yield tool.translated(f"{given}.{i}"), kind | {"name": tool.name}
        elif isinstance(tool, NamespaceTool):
            for j, each in enumerate(tool.tools):
                description = "\n".join(filter(None, (tool.description, each.description)))
                function = each.translated(f"{given}.{i}.tools.{j}")
                renamed = replace(function, name=full_name(tool.name, each.name), description=description)
                yield renamed, {"name": each.name, "namespace": tool.name}


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name of a tool for the model."""
    return name if namespace is None else f"{namespace}__{name}"


def translated_choice(choice: ToolChoice | None) -> request.ToolChoice:
    match choice:
        case NamedTool(name=name):
            return request.ToolChoice("required", named=name)
        case AllowedTools(mode=mode, tools=tools):
            return request.ToolChoice(mode, allowed=[tool.name for tool in tools])
    return request.ToolChoice(choice or "auto")
