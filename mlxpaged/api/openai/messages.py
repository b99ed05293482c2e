"""The messages of a conversation in request bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlxpaged.api.openai.tools import Call
from mlxpaged.api.schema import MAX_LIST, Body


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    # LiteLLM's notes on an answer, which it sends back with it; they say nothing that other fields do not.
    provider_specific_fields: dict[str, Any] | None = None
    # OpenAI's client sends an answer's fields back as it got them.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _fields_fit_role(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError("only the assistant has tool_calls and reasoning_content")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: Field required")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("a message of the role 'tool' has a tool_call_id, and no other one has")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: plain text, and `system` for OpenAI's `developer`."""
        parts = [] if self.content is None else self.content
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        fields: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()] or None,
            "reasoning_content": self.reasoning_content,
        }
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | {name: value for name, value in fields.items() if value is not None}
