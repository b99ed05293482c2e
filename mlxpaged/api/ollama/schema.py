"""Defines the request bodies of Ollama's API."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlxpaged.api.embeddings import MAX_INPUTS
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import ollama as fields
from mlxpaged.api.fields.kinds import OLLAMA_TOOLS
from mlxpaged.api.foreign import OtherTool, hint, known_tools
from mlxpaged.api.media import ImageBlock, ImageSource
from mlxpaged.api.ollama.durations import stay_of
from mlxpaged.api.schema import MAX_LIST, MAX_TOOLS, Body, OneOf, ToolName, TopP, stop_field

MAX_TOP_LOGPROBS = 20

ModelName = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def context_size(value: int | None) -> int | None:
    if value == 1:
        raise ValueError("must be -1 for all tokens, 0 for no penalty, or at least 2")
    return value


class Options(Body):
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None  # below 0: a random one
    num_predict: int | None = None  # most tokens of the answer; below 1: no limit
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: TopP = None
    min_p: Fraction | None = None
    stop: Annotated[list[str] | None, stop_field("options.stop")] = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    # The penalty is for so many of the last tokens; -1: all; 0: there is no penalty.
    repeat_last_n: Annotated[Annotated[int, Field(ge=-1, lt=2**31)] | None, AfterValidator(context_size)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    end_loops: bool | None = None  # ours


def duration(given: Any) -> Any:
    """Returns what says how long a model stays loaded. Raises ValueError for another kind of value too: pydantic would
    not say what can be given."""
    if given is not None:
        stay_of(given)
    return given


class LoadingFields(Body):
    """The fields of requests that load a model. keep_alive: how long it stays loaded after its last request."""

    model: ModelName
    keep_alive: Annotated[str | float | None, BeforeValidator(duration)] = None

    @property
    def stay(self) -> float | None:
        """What `keep_alive` asks for, in seconds; None for the server's default."""
        return None if self.keep_alive is None else stay_of(self.keep_alive)


class GeneratingFields(LoadingFields):
    """The fields that chat and generate share. stream: null is true. think: null leaves it to the chat template."""

    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Annotated[bool | Literal["low", "medium", "high", "max"] | None, hint("think")] = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False


class CalledFunction(Body):
    name: str
    arguments: dict[str, Any]


class Call(Body):
    id: str | None = None
    function: CalledFunction


Images = Annotated[list[str], Field(max_length=MAX_LIST, fail_fast=True)]
"""Files in base64."""


def images_of(images: list[str] | None) -> list[ImageBlock]:
    return [ImageBlock(type="image", source=ImageSource(data=data)) for data in images or ()]


class Message(Body):
    """images: they stand before the content. tool_name, tool_call_id: the call that a tool's message answers; without
    them, the first open call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @cached_property
    def shown_images(self) -> list[ImageBlock]:
        return images_of(self.images)


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function", None] = None
    function: Function


Tool = Annotated[FunctionTool | OtherTool, OneOf("type", hidden=("other",), default=lambda fields: "function")]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), known_tools(OLLAMA_TOOLS, "tools", "function")]


class OllamaChatRequest(GeneratingFields):
    """Without messages, it asks to load or unload the model."""

    table = fields.CHAT

    messages: Annotated[list[Message], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    tools: Tools | None = None


class OllamaGenerateRequest(GeneratingFields):
    """Without a prompt, it asks to load or unload the model. raw: the prompt goes to the model as it is. images: they
    stand before the prompt. suffix: the answer is what stands between the prompt and it, without a chat template."""

    table = fields.GENERATE

    prompt: str | None = None
    images: Images | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> OllamaGenerateRequest:
        for name in ("system", "think", "images"):
            if self.suffix and getattr(self, name):
                raise bad_parameter(name, "cannot be combined with suffix: no chat template shows it to the model")
        if self.raw and self.system:
            raise bad_parameter("system", "cannot be combined with raw; put it into the prompt")
        if self.raw and self.think:
            raise bad_parameter("think", "cannot be combined with raw; put the tags into the prompt")
        if self.raw and self.images:
            raise bad_parameter("images", "cannot be combined with raw: the chat template shows them to the model")
        return self


class OllamaEmbedRequest(LoadingFields):
    """An empty input asks to load or unload the model. truncate: null is true."""

    table = fields.EMBED

    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsRequest(LoadingFields):
    """An empty prompt asks to load or unload the model."""

    table = fields.EMBEDDINGS

    prompt: str | None = None


class NamingFields(Body):
    """The fields of requests about a model. name: the old name of `model`."""

    model: ModelName | None = None
    name: ModelName | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> NamingFields:
        if self.model is None and self.name is None:
            raise bad_parameter("model", "Field required")
        return self


class OllamaShowRequest(NamingFields):
    table = fields.SHOW


class OllamaPullRequest(NamingFields):
    """stream: null is true."""

    table = fields.PULL

    stream: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False
