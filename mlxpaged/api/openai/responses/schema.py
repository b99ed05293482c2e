"""The body of POST /v1/responses, and what it means to the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.openai.body import Body
from mlxpaged.api.openai.messages import MAX_LIST
from mlxpaged.api.openai.schema import MAX_TOP_LOGPROBS, Probability, SamplingFields
from mlxpaged.engine import SamplingParams

LOGPROBS = "message.output_text.logprobs"


class ContentPart(Body):
    """annotations, logprobs: of an earlier answer that is sent back; they are not for the model."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    """id, status: of an earlier answer that is sent back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(Body):
    model: str | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Probability, Field(gt=0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    # Accepted for what they are: labels that change nothing.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not supported beyond the value that asks for nothing.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ResponseRequest:
        if self.top_logprobs and not self.wants_logprobs:
            raise bad_parameter("top_logprobs", f"needs include to have {LOGPROBS!r}")
        if self.stream_options is not None and not self.stream:
            raise bad_parameter("stream_options", "needs stream to be true")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def kept(self) -> bool:
        """Whether the answer can be asked for again, and continued; the default is OpenAI's."""
        return self.store is not False

    def sampling(self) -> SamplingFields:
        """The part that all routes for text have in common."""
        return SamplingFields(temperature=self.temperature, top_p=self.top_p, service_tier=self.service_tier)

    def params(self) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.wants_logprobs else None
        return self.sampling().sampling_params(self.max_output_tokens, logprobs)

    def messages(self) -> list[dict[str, Any]]:
        """The new part of the conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [message.for_template() for message in self.input]


class ItemList(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
