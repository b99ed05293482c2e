"""Tools in requests of the responses API, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.openai.body import Body, one_of
from mlxpaged.api.openai.tools import MAX_TOOLS, ToolName

Half = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,63}$")]
"""Of the name that a tool of a namespace has for the model, which is as long as any tool's may be."""


class FunctionTool(Body):
    """strict: enforced where it is true, and only there. The last three are what every tool here is."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = None


class NamespacedTool(FunctionTool):
    name: Half


class NamespaceTool(Body):
    """Functions whose calls say where they belong. description: of all of them."""

    type: Literal["namespace"]
    name: Half
    description: str
    tools: Annotated[list[NamespacedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class WebSearchTool(Body):
    """OpenAI's own, which a model may leave unused. Here it always does: it is not told of it."""

    type: Literal["web_search"]
    external_web_access: bool | None = None


Tool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[WebSearchTool, Tag("[web_search]")],
    one_of("type", "function and namespace"),
]


class NamedTool(Body):
    type: Literal["function"]
    name: ToolName


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("[function]")] | Annotated[AllowedTools, Tag("[allowed_tools]")],
        one_of("type", "function and allowed_tools"),
    ]
)


def check_kinds(tools: Any) -> None:
    """Raises ApiError for tools that the server would have to have itself. Web search may stand beside functions, as
    Codex always sends it; a request that has nothing else is for it. tools: before anything of them is checked."""
    kinds = [
        tool.get("type") if isinstance(tool, dict) else None for tool in (tools if isinstance(tools, list) else ())
    ]
    possible = {"function", "namespace"} | (
        {"web_search"} if {"function", "namespace"} & set(map(str, kinds)) else set()
    )
    for i, kind in enumerate(kinds):
        if isinstance(kind, str) and kind not in possible:
            raise bad_parameter(f"tools.{i}.type", f"{kind!r} is no tool of this server, which has none of its own")


@dataclass(frozen=True)
class Function:
    """A tool that can be called. param: where it stands in the request. name: what the model calls it."""

    param: str
    namespace: str | None
    name: str
    description: str | None
    tool: FunctionTool


def functions(tools: Sequence[Tool] | None) -> Iterator[Function]:
    for i, tool in enumerate(tools or ()):
        if isinstance(tool, FunctionTool):
            yield Function(f"tools.{i}", None, tool.name, tool.description, tool)
        elif isinstance(tool, NamespaceTool):
            for j, each in enumerate(tool.tools):
                description = "\n".join(filter(None, (tool.description, each.description)))
                yield Function(f"tools.{i}.tools.{j}", tool.name, full_name(tool.name, each.name), description, each)


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def chat_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """As a chat request has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": each.name,
                "description": each.description,
                "parameters": each.tool.parameters,
                "strict": each.tool.strict,
            },
        }
        for each in functions(tools)
    ]


def chat_choice(choice: str | NamedTool | AllowedTools | None) -> str | dict[str, Any] | None:
    """As a chat request has it."""
    if isinstance(choice, NamedTool):
        return named(choice)
    if isinstance(choice, AllowedTools):
        allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def called_as(tools: Sequence[Tool] | None) -> dict[str, dict[str, str]]:
    """By a tool's name for the model: the fields that name it in a call."""
    return {
        each.name: {"name": each.tool.name} | ({} if each.namespace is None else {"namespace": each.namespace})
        for each in functions(tools)
    }
