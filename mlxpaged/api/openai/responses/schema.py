"""Defines the bodies of the responses API and the items of its conversations."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import responses as fields
from mlxpaged.api.fields.kinds import ITEMS, RESPONSES_TOOLS
from mlxpaged.api.foreign import SHOWN, UNREADABLE, hint, known_tools, leave_out, text_shown, type_name
from mlxpaged.api.media import Medium, all_but
from mlxpaged.api.openai.responses.tools import Tool, ToolChoice
from mlxpaged.api.openai.schema import MAX_TOP_LOGPROBS, RefusalPart, RequestFields
from mlxpaged.api.openai.structured import JsonSchema, TextFormat
from mlxpaged.api.openai.thinking import Effort
from mlxpaged.api.page import PageQuery
from mlxpaged.api.schema import MAX_LIST, MAX_TOOLS, Body, Limit, OneOf

LOGPROBS = "message.output_text.logprobs"
REFERENCE = "item_reference"
"""The type of items that refer to another one."""
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


def known_only(names: Any, info: ValidationInfo) -> Any:
    """Returns the names of what is to be included, without those of tools that the server does not run."""
    if not isinstance(names, list):
        return names
    for name in names:
        if isinstance(name, str) and name not in INCLUDED:
            leave_out(info, f"include.{type_name(name)}", "answers have nothing of this kind")
    return [name for name in names if name in INCLUDED or not isinstance(name, str)]


class ContentPart(Body):
    """annotations, logprobs: of an earlier answer that the client sends back. They are not shown to the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Part = Annotated[ContentPart | RefusalPart | Medium, OneOf("type", hidden=("refusal", *all_but("input_image")))]
Content = str | Annotated[list[Part], Field(max_length=MAX_LIST, fail_fast=True)]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class StoredItem(Body):
    """id, status: of an item that the client sends back. They change nothing."""

    id: str | None = None
    status: str | None = None

    def shown(self, item_id: str) -> dict[str, Any]:
        """Returns this item as it stands in the list of a response's input items."""
        return {"status": "completed"} | self.model_dump(exclude_none=True) | {"id": item_id}


class MessageItem(StoredItem):
    """phase: a label of OpenAI's models. No chat template shows it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None

    def shown(self, item_id: str) -> dict[str, Any]:
        item = super().shown(item_id)
        if isinstance(self.content, str):
            said = self.role == "assistant"
            part = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
            item["content"] = [part | {"text": self.content}]
        return item


class FunctionCall(StoredItem):
    """arguments: JSON, as the model wrote them. namespace: that of the tool, if it has one. caller: what made the call
    in another service; it changes nothing."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class FunctionCallOutput(StoredItem):
    """name, namespace: of the tool. The call has them too."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class CustomToolCall(StoredItem):
    """input: the text for the tool."""

    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    input: str


class CustomToolCallOutput(StoredItem):
    type: Literal["custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    name: str | None = None


class ReasoningPart(BaseModel):
    """A part of the thinking, or of its summary. One of another type is shown as text too, and named."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _other_types_are_named(self, info: ValidationInfo) -> ReasoningPart:
        if self.type not in ("reasoning_text", "summary_text"):
            leave_out(info, f"input.reasoning.{type_name(self.type)}", SHOWN if self.text else UNREADABLE)
        return self


class ReasoningItem(StoredItem):
    """encrypted_content: the thinking in a form that only another server can read. It is left out."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _encrypted_thoughts_are_named(self, info: ValidationInfo) -> ReasoningItem:
        if self.encrypted_content and not self.content:
            leave_out(info, "input.reasoning.encrypted_content", "this server cannot decrypt it")
        return self

    @property
    def text(self) -> str:
        """Returns the thinking itself, or its summary if there is nothing else."""
        return "\n".join(part.text for part in self.content or self.summary or () if part.text)


class ToolsItem(StoredItem):
    """Tools that can be called from here on: those in it that the client runs."""

    type: Literal["additional_tools", "tool_search_output"]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), known_tools(RESPONSES_TOOLS, "input.tools")]
    role: str | None = None
    call_id: str | None = None
    execution: str | None = None


class OtherItem(BaseModel):
    """An item of another provider's service. What can be read of it is shown to the model as text."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str

    @model_validator(mode="after")
    def _is_named(self, info: ValidationInfo) -> OtherItem:
        reason = UNREADABLE if self.text is None else SHOWN
        leave_out(info, f"input.{type_name(self.type)}", reason)
        return self

    @cached_property
    def text(self) -> str | None:
        return text_shown(self.type, self.model_extra or {}, ITEMS)

    @property
    def is_result(self) -> bool:
        """Whether it came from the client, or from what the client's program did."""
        return self.type.endswith(("_output", "_response"))

    @property
    def is_of_answer(self) -> bool:
        return not self.is_result

    @property
    def call_id(self) -> str | None:
        given = (self.model_extra or {}).get("call_id")
        return given if isinstance(given, str) else None

    def shown(self, item_id: str) -> dict[str, Any]:
        """Returns this item as the client has sent it."""
        return self.model_dump() | {"id": item_id}


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference", None] = None
    id: str


CallItem = FunctionCall | CustomToolCall
ResultItem = FunctionCallOutput | CustomToolCallOutput
Item = MessageItem | CallItem | ResultItem | ReasoningItem | ToolsItem | OtherItem
OutputItem = Annotated[MessageItem | CallItem | ReasoningItem, Field(discriminator="type")]
InputItem = Annotated[
    Item | ItemReference,
    OneOf("type", default=lambda fields: "message" if "role" in fields else "item_reference"),
]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[TextFormat | SchemaFormat, OneOf("type")] | None = None


class Reasoning(Body):
    effort: Annotated[Effort, hint("reasoning.effort")] = None


class InputTokensRequest(Body):
    """These fields determine the prompt."""

    table = fields.INPUT_TOKENS

    model: str | None = None
    # Before `input`, whose items can have tools too: it is the place by which fields of tools are named.
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), known_tools(RESPONSES_TOOLS, "tools")] | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None

    @property
    def items(self) -> list[InputItem]:
        """Returns the new part of the conversation."""
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input


class ResponseRequest(RequestFields, InputTokensRequest):
    table = fields.TABLE

    store: bool | None = None
    max_output_tokens: Limit = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[str], Field(fail_fast=True), BeforeValidator(known_only)] | None = None
    # Codex's labels, and a limit on calls of OpenAI's own tools, which this server does not have. They change nothing.
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None

    # The other requests for text have these properties too. Here one prompt has one answer.
    num_candidates: ClassVar[int] = 1
    multiplier: ClassVar[str | None] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponseRequest:
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_parameter("top_logprobs", f"needs {LOGPROBS!r} in include")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def kept(self) -> bool:
        """Whether the response is stored. The default is OpenAI's."""
        return self.store is not False


class ItemList(PageQuery):
    order: Literal["asc", "desc"] = "desc"
