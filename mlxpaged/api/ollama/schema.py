"""Defines the request bodies of Ollama's API. Fields that are not listed here are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, model_validator

from mlxpaged.api.embeddings import MAX_INPUTS
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.schema import MAX_LIST, MAX_TOOLS, Body, Stop, ToolName

MAX_TOP_LOGPROBS = 20

ModelName = Annotated[str, Field(min_length=1)]
KeepAlive = str | float | None
"""How long the model is to stay loaded. It changes nothing: the model is loaded as long as the server runs."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def no_images(value: Any) -> None:
    if value:
        raise bad_parameter("images", "images are not supported by this server")


NoImages = Annotated[None, PlainValidator(no_images, json_schema_input_type=list[str] | None)]


def only(off: float) -> AfterValidator:
    """Accepts the one value that turns a way of sampling off. Another value would ask for other answers."""

    def check(value: float | None) -> float | None:
        if value not in (None, off):
            raise ValueError(f"this server does not sample in this way; only {off:g}, which turns it off, is accepted")
        return value

    return AfterValidator(check)


class Options(Body):
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None  # below 0: a random one
    num_predict: int | None = None  # most tokens of the answer; below 1: no limit
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Fraction | None = None
    stop: Stop = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: int | None = None  # 0 turns the penalty off; the penalty always counts the whole text
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Only the values that change nothing are accepted.
    typical_p: Annotated[float | None, only(1)] = None
    tfs_z: Annotated[float | None, only(1)] = None
    mirostat: Annotated[int | None, only(0)] = None
    # They say how Ollama loads a model or uses the machine, and change nothing here.
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    penalize_newline: Any = None
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_gqa: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    numa: Any = None
    rope_frequency_base: Any = None
    rope_frequency_scale: Any = None


class GeneratingFields(Body):
    """The fields that chat and generate share. stream: null is true. think: null leaves it to the chat template."""

    model: ModelName
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    keep_alive: KeepAlive = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` asks to end the model's time in memory now."""
        given = self.keep_alive
        return given.rstrip("smh") == "0" if isinstance(given, str) else given == 0


class CalledFunction(Body):
    name: str
    arguments: dict[str, Any]
    index: int | None = None  # the list's order says the same


class Call(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Body):
    """tool_name, tool_call_id: the call that a tool's message answers; without them, the first open call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] | None = None
    function: Function


class OllamaChatRequest(GeneratingFields):
    """Without messages, it asks to load or unload the model."""

    messages: Annotated[list[Message], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    # Only the values that change nothing are accepted: a conversation that is too long is refused.
    truncate: Literal[False] | None = None
    shift: Literal[False] | None = None


class OllamaGenerateRequest(GeneratingFields):
    """Without a prompt, it asks to load or unload the model. raw: the prompt goes to the model as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: NoImages = None
    # Only the values that change nothing are accepted.
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    truncate: Literal[False] | None = None
    shift: Literal[False] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> OllamaGenerateRequest:
        if self.suffix:
            raise bad_parameter("suffix", "this server does not fill in the middle of a text")
        if self.template:
            raise bad_parameter("template", "this server uses the model's own chat template; use raw for another one")
        if self.context:
            raise bad_parameter("context", "is not supported; send the conversation to /api/chat")
        if self.raw and self.system:
            raise bad_parameter("system", "cannot be combined with raw; put it into the prompt")
        if self.raw and self.think:
            raise bad_parameter("think", "cannot be combined with raw; put the tags into the prompt")
        return self


class OllamaEmbedRequest(Body):
    """An empty input asks to load the model. truncate: null is true."""

    model: ModelName
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(Body):
    """An empty prompt asks to load the model."""

    model: ModelName
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive = None


class OllamaShowRequest(Body):
    """name: the old name of `model`. verbose: changes nothing, because everything is always shown."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None

    @model_validator(mode="after")
    def _names_a_model(self) -> OllamaShowRequest:
        if self.model is None and self.name is None:
            raise bad_parameter("model", "Field required")
        return self
