"""Defines tools in requests of the responses API, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation import request
from mlxpaged.api.openai.tools import Function, FunctionName
from mlxpaged.api.schema import MAX_TOOLS, Body, OneOf, ToolName

CALLABLE = {"function", "namespace", "custom"}
WORDS = {"lark": "Lark's notation", "regex": "the form of a regular expression"}

Half = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,63}$")]
"""The name of a namespace, or of a tool in it. The model sees both as one name, as long as a tool's name may be."""


class FunctionTool(Function):
    """strict: whether its calls must fit the parameters. The last three fields accept only values that change
    nothing."""

    type: Literal["function"]
    output_schema: None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None


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


class WebSearchTool(Body):
    """OpenAI's own tool. It is accepted, but the model is not told of it."""

    type: Literal["web_search"]
    external_web_access: bool | None = None


class OtherTool(Body):
    """Any other tool that the server would have to run, beside functions. The model is not told of it."""

    type: Literal["other"]


Tool = Annotated[
    FunctionTool | NamespaceTool | CustomTool | WebSearchTool | OtherTool, OneOf("type", hidden=("web_search", "other"))
]


class NamedTool(FunctionName):
    type: Literal["function", "custom"]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, OneOf("type")]


def check_kinds(tools: Any) -> Any:
    """Returns the tools, not validated yet. Those that the server would have to run itself are accepted beside
    functions, because agents send them to every server. Raises ApiError if there are no others."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:  # which is refused for its length
        return tools
    kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in tools]
    others = [i for i, kind in enumerate(kinds) if isinstance(kind, str) and kind not in CALLABLE]
    if others and not CALLABLE & set(map(str, kinds)):
        message = f"{kinds[others[0]]!r} tools are not supported; the server runs no tools itself"
        raise bad_parameter(f"tools.{others[0]}.type", message)
    return [{"type": "other"} if i in others and kinds[i] != "web_search" else tool for i, tool in enumerate(tools)]


def functions(tools: Sequence[Tool] | None) -> Iterator[tuple[request.Tool, dict[str, str]]]:
    """Yields each tool that can be called, under its name for the model, and what its calls have in the API."""
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool | CustomTool):
            kind = {"type": "custom_tool_call"} if isinstance(tool, CustomTool) else {}
            yield tool.translated(f"tools.{i}"), kind | {"name": tool.name}
        elif isinstance(tool, NamespaceTool):
            for j, each in enumerate(tool.tools):
                description = "\n".join(filter(None, (tool.description, each.description)))
                function = each.translated(f"tools.{i}.tools.{j}")
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
