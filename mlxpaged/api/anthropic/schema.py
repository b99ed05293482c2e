"""Defines the request bodies of the Messages API. `api/fields/messages.py` says what happens to other fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, model_validator

from mlxpaged.api.anthropic.client_tools import CLIENT_TOOLS
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import messages as fields
from mlxpaged.api.fields.kinds import MESSAGES_TOOLS
from mlxpaged.api.foreign import OtherTool, hint, known_tools, leave_out
from mlxpaged.api.media import Medium, all_but
from mlxpaged.api.schema import MAX_LIST, MAX_TOOLS, Body, Label, OneOf, TokenLimit, ToolName, TopP, stop_field


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """signature: it is not checked, see signature.py. It holds the text if `thinking` is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = Annotated[list[TextBlock], Field(max_length=MAX_LIST, fail_fast=True)]


class ToolReference(Body):
    """A tool with `defer_loading` that the model may call from here on."""

    type: Literal["tool_reference"]
    tool_name: ToolName


class ToolsBlock(BaseModel):
    """Makes tools with `defer_loading` callable from here on. names: of those that the request has."""

    type: Literal["tool_search_tool_result", "tool_addition"]
    names: list[str]

    @model_validator(mode="before")
    @classmethod
    def _names_tools(cls, value: Any) -> Any:
        return {"type": value["type"], "names": list(referred(value))} if isinstance(value, dict) else value


def referred(value: Any) -> Iterator[str]:
    """Yields the names of the tools that references in a value have."""
    if isinstance(value, dict):
        name = value.get("tool_name") or value.get("name")
        if value.get("type") == "tool_reference" and isinstance(name, str):
            yield name
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from referred(each)


HIDDEN = all_but("image")
ResultBlock = Annotated[TextBlock | ToolReference | Medium, OneOf("type", hidden=HIDDEN)]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    is_error: bool | None = None


OF_TOOLS = ("tool_search_tool_result", "tool_addition", *HIDDEN)
UserBlock = Annotated[TextBlock | ToolResultBlock | ToolsBlock | Medium, OneOf("type", hidden=OF_TOOLS)]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolsBlock | Medium, OneOf("type", hidden=OF_TOOLS)
]
SystemBlock = Annotated[TextBlock | ToolsBlock | Medium, OneOf("type", hidden=OF_TOOLS)]


class UserMessage(Body):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(max_length=MAX_LIST, fail_fast=True)]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(max_length=MAX_LIST, fail_fast=True)]


class SystemMessage(Body):
    """A system message that stands between the turns."""

    role: Literal["system"]
    content: str | Annotated[list[SystemBlock], Field(max_length=MAX_LIST, fail_fast=True)]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, OneOf("role")]


class CallableTool(Body):
    """defer_loading: the model does not see the tool until a tool_reference names it."""

    name: ToolName
    strict: bool | None = None
    defer_loading: bool | None = None


class FunctionTool(CallableTool):
    type: Literal["custom", None] = None
    description: str | None = None
    input_schema: dict[str, Any]


class ClientTool(CallableTool):
    """A tool of Anthropic's that the client runs: the model is shown a function. max_characters: of a file, which the
    client cuts there."""

    type: Literal[
        "bash_20241022",
        "bash_20250124",
        "text_editor_20241022",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "memory_20250818",
    ]
    max_characters: Annotated[int, Field(ge=1)] | None = None

    @property
    def description(self) -> str:
        cut = f" A file is shown up to {self.max_characters:,} characters." if self.max_characters else ""
        return CLIENT_TOOLS[self.type].description + cut

    @property
    def input_schema(self) -> dict[str, Any]:
        return CLIENT_TOOLS[self.type].schema


Tool = Annotated[
    FunctionTool | ClientTool | OtherTool, OneOf("type", hidden=("other",), default=lambda fields: "custom")
]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), known_tools(MESSAGES_TOOLS, "tools", "custom")]


class AutoChoice(Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NoChoice(Body):
    type: Literal["none"]


class NamedChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


Display = Literal["summarized", "omitted"]
"""Whether the text of the thinking is shown. It is never shortened."""


class ThinkingEnabled(Body):
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]
    display: Annotated[Display | None, hint("thinking.display")] = None


class ThinkingAdaptive(Body):
    type: Literal["adaptive"]
    display: Annotated[Display | None, hint("thinking.display")] = None


class ThinkingDisabled(Body):
    type: Literal["disabled"]


class ThinkingOther(BaseModel):
    """A kind of thinking that this server does not know. The chat template decides."""

    type: str

    @model_validator(mode="after")
    def _is_named(self, info: ValidationInfo) -> ThinkingOther:
        leave_out(info, "thinking.type", "this value is not known")
        return self


ToolChoice = Annotated[AutoChoice | NoChoice | NamedChoice, OneOf("type")]
Thinking = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | ThinkingOther, OneOf("type")]


class Metadata(Body):
    user_id: Label | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Annotated[Literal["low", "medium", "high", "xhigh", "max"] | None, hint("output_config.effort")] = None
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """These fields determine the prompt."""

    table = fields.COUNT

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    system: str | Texts | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _client_tools_have_their_names(self) -> CountTokensRequest:
        for i, tool in enumerate(self.tools or ()):
            if isinstance(tool, ClientTool) and tool.name != (expected := CLIENT_TOOLS[tool.type].name):
                raise bad_parameter(f"tools.{i}.name", f"that of a {tool.type} tool is {expected!r}")
        return self

    @model_validator(mode="after")
    def _results_have_calls(self) -> CountTokensRequest:
        open_calls: set[str] = set()
        tools = {tool.name for tool in self.tools or () if isinstance(tool, CallableTool)}
        for i, message in enumerate(self.messages):
            for j, block in enumerate(blocks_of(message)):
                if isinstance(block, ToolUseBlock):
                    open_calls.add(block.id)
                elif isinstance(block, ToolResultBlock) and block.tool_use_id not in open_calls:
                    name = f"messages.{i}.content.{j}.tool_use_id"
                    raise bad_parameter(name, "no tool_use block before this one has this id")
                for name in references(block) if isinstance(block, ToolResultBlock) else ():
                    if name not in tools:
                        raise bad_parameter(f"messages.{i}.content.{j}.content", f"no tool has the name {name!r}")
        if any(isinstance(block, ToolUseBlock) for block in blocks_of(self.messages[-1])):
            raise bad_parameter("messages", "the last message has tool_use blocks without their tool_result")
        return self

    def offered_tools(self) -> list[tuple[int, FunctionTool | ClientTool]]:
        """Returns the tools with their indices. Deferred tools that no result has referred to are left out."""
        loaded = {name for message in self.messages for block in blocks_of(message) for name in references(block)}
        tools = [(index, tool) for index, tool in enumerate(self.tools or ()) if not isinstance(tool, OtherTool)]
        return [(index, tool) for index, tool in tools if not tool.defer_loading or tool.name in loaded]

    @property
    def omits_thinking(self) -> bool:
        return getattr(self.thinking, "display", None) == "omitted"


def blocks_of(message: UserMessage | AssistantMessage | SystemMessage) -> Sequence[BaseModel]:
    return [] if isinstance(message.content, str) else message.content


def references(block: BaseModel) -> list[str]:
    """Returns the names of the tools that a block makes callable."""
    if isinstance(block, ToolsBlock):
        return block.names
    parts = block.content if isinstance(block, ToolResultBlock) and isinstance(block.content, list) else []
    return [part.tool_name for part in parts if isinstance(part, ToolReference)]


class MessagesRequest(CountTokensRequest):
    table = fields.TABLE

    max_tokens: TokenLimit
    stop_sequences: Annotated[list[str] | None, stop_field("stop_sequences")] = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: TopP = None
    metadata: Metadata | None = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, hint("service_tier")] = None
    end_loops: bool | None = None  # ours

    @model_validator(mode="after")
    def _thinking_leaves_room(self) -> MessagesRequest:
        limit = self.max_tokens
        if limit is not None and isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= limit:
            raise bad_parameter("thinking.budget_tokens", f"must be less than max_tokens, which is {limit}")
        return self
