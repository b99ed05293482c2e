"""The items of a conversation in the responses API: what a request's `input` is made of, and a response's `output`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mlxpaged.api.schema import MAX_LIST, Body


class ContentPart(Body):
    """annotations, logprobs: of an earlier answer that the client sends back. They are not shown to the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Content = str | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class StoredItem(Body):
    """id, status: of an item that the client sends back. They change nothing."""

    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def shown(self, item_id: str) -> dict[str, Any]:
        """This item in the list of a response's input items."""
        return {"status": "completed"} | self.model_dump(exclude_none=True) | {"id": item_id}


class MessageItem(StoredItem):
    """phase: a label of OpenAI's models. No chat template shows it."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None

    def shown(self, item_id: str) -> dict[str, Any]:
        item = super().shown(item_id)
        if isinstance(self.content, str):
            said = self.role == "assistant"
            part = {"type": "output_text", "annotations": []} if said else {"type": "input_text"}
            item["content"] = [part | {"text": self.content}]
        return item


class FunctionCall(StoredItem):
    """arguments: JSON, as the model wrote them. namespace: that of the tool, if it has one."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: str
    arguments: str
    namespace: str | None = None
    caller: None = None


class FunctionCallOutput(StoredItem):
    """name, namespace: of the tool. The call has them too."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    name: str | None = None
    namespace: str | None = None
    caller: None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(StoredItem):
    """encrypted_content: the thinking in a form that only another server can read."""

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _thoughts_can_be_read(self) -> ReasoningItem:
        if self.encrypted_content is not None and not self.content:
            raise ValueError("encrypted_content: another server made it; without content there is nothing to read")
        return self

    @property
    def text(self) -> str:
        """The thinking itself, or its summary if there is nothing else."""
        return "\n".join(part.text for part in self.content or self.summary or ())


class ItemReference(Body):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


def kind_of(value: Any) -> str:
    """A union's branch, in brackets, as pydantic writes branches in an error's path."""
    fields = value if isinstance(value, dict) else vars(value) if isinstance(value, Body) else {}
    # Messages and references may leave the type out.
    return f"[{fields.get('type') or ('message' if 'role' in fields else 'item_reference')}]"


Item = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem
OutputItem = Annotated[MessageItem | FunctionCall | ReasoningItem, Field(discriminator="type")]
InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCall, Tag("[function_call]")]
    | Annotated[FunctionCallOutput, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")],
    Discriminator(
        kind_of,
        custom_error_type="unsupported_type",
        custom_error_message="type: only message, function_call, function_call_output, reasoning and item_reference "
        "are supported here",
    ),
]
