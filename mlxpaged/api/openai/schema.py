"""Defines the bodies of chat completions and completions. `api/fields/` says what happens to other fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import chat, completions
from mlxpaged.api.fields.kinds import CHAT_TOOLS
from mlxpaged.api.foreign import SHOWN, UNREADABLE, as_text, hint, known_tools, leave_out
from mlxpaged.api.media import Medium, all_but
from mlxpaged.api.openai.structured import ResponseFormat, StructuredFields
from mlxpaged.api.openai.thinking import ThinkingFields
from mlxpaged.api.openai.tools import Call, CalledFunction, FunctionCall, Tool, ToolChoice
from mlxpaged.api.schema import (
    MAX_LIST,
    MAX_TOOLS,
    UNLIMITED,
    Body,
    Label,
    Labels,
    OneOf,
    TokenLimit,
    TopP,
    stop_field,
    until_first_fault,
)
from mlxpaged.parts.drafting.acceptance import MOST_DRAFTS

MAX_TOP_LOGPROBS = 20
MAX_BIAS = 100
MAX_BIASED = 300
"""Tokens with a bias. OpenAI's API has the same limit. Each step adds them to the logits of each answer."""
MAX_SALT_LENGTH = 256
MAX_TOKEN_ID_DIGITS = 9
MAX_CHOICES = 16
"""The most answers to one prompt."""

Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Seconds = Annotated[float, Field(gt=0)]


def no_penalty(value: Any) -> Any:
    """Returns 1 for 0, which is no penalty in mlx-lm. None would be the model's default, which can be a penalty."""
    return 1.0 if type(value) in (int, float) and value == 0 else value


def fits_bias(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_BIAS


class ResponseStreamOptions(Body):
    """No option has an effect in the responses API."""


class StreamOptions(ResponseStreamOptions):
    """continuous_usage_stats: with include_usage, every chunk has the usage so far, as in vLLM."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class RequestFields(Body):
    """The fields that chat completions, completions and responses share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP = None
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    service_tier: Annotated[Literal["auto", "default", "flex", "priority"] | None, hint("service_tier")] = None
    # Labels that change nothing.
    user: Label | None = None
    metadata: Labels | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    # The deadlines are not OpenAI's.
    timeout: Seconds | None = None
    ttft_timeout: Seconds | None = None
    return_progress: bool | None = None  # llama.cpp's
    end_loops: bool | None = None  # ours


class SamplingFields(RequestFields, StructuredFields):
    """The fields that chat completions and completions share. SamplingParams takes its own from here, by name."""

    max_tokens: TokenLimit = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[Annotated[float, Field(gt=0, le=10)] | None, BeforeValidator(no_penalty)] = None
    repetition_context_size: Annotated[Annotated[int, Field(ge=2, lt=2**31)] | None, UNLIMITED] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED), until_first_fault(fits_bias)] | None = None
    seed: Annotated[Annotated[int, Field(ge=-(2**63), lt=2**64)] | None, UNLIMITED] = None
    stop: Annotated[list[str] | None, stop_field("stop")] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # vLLM's
    adapters: str | None = None  # mlx-lm's
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_LENGTH)] | None = None  # vLLM's
    speculative: bool | Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | None = None  # ours

    @model_validator(mode="after")
    def _a_stream_has_no_prompt_logprobs(self) -> SamplingFields:
        if self.prompt_logprobs is not None and self.stream:
            raise bad_parameter("prompt_logprobs", "is not available if stream is true")
        return self

    @field_validator("logit_bias")
    @classmethod
    def _biases_name_tokens(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_ID_DIGITS):
                raise ValueError(f"keys must be token ids, got {key[:40]!r}")
        return value

    @property
    def num_candidates(self) -> int:
        """The number of answers that are generated per prompt."""
        return self.n or 1

    @property
    def multiplier(self) -> str | None:
        """The field that asks for more than one sequence per prompt, if any."""
        return "n" if self.num_candidates > 1 else None


class TextPart(Body):
    """The last two types are those of the responses API."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """What an earlier answer said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(BaseModel):
    """The thinking of an earlier answer: a text, or parts of text, in the field `thinking` or `text`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["thinking", "reasoning"]
    thinking: Any = None
    text_: Annotated[Any, Field(alias="text")] = None

    @property
    def thought(self) -> str:
        return as_text(self.thinking or self.text_)

    @property
    def text(self) -> str:
        """Returns what the answer has of it."""
        return ""


class SpokenAnswer(BaseModel):
    """An earlier answer of a model that speaks. The model is shown what was said, if the client has kept it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    transcript: str | None = None

    @model_validator(mode="after")
    def _sound_is_named(self, info: ValidationInfo) -> SpokenAnswer:
        leave_out(info, "messages.audio", UNREADABLE if self.transcript is None else SHOWN)
        return self


HIDDEN = ("input_text", "output_text", "refusal", "thinking", "reasoning", *all_but("image_url"))
Part = Annotated[TextPart | RefusalPart | ThinkingPart | Medium, OneOf("type", hidden=HIDDEN)]


ROLES = {"developer": "system", "function": "tool"}
"""What chat templates call the roles that they do not know."""


class Message(Body):
    """prefix: whether the answer continues this message, if it is the last; Mistral's. function_call, and the role
    `function`: a call and its result, as OpenAI's API had them before tools."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None
    refusal: str | None = None
    audio: SpokenAnswer | None = None

    @model_validator(mode="after")
    def _fields_fit_role(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.function_call or self.reasoning_content):
            raise ValueError("only messages of the role 'assistant' may have tool_calls or reasoning_content")
        if self.content is None and self.role not in ("assistant", "tool", "function"):
            raise ValueError("content: is required")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is not allowed in messages of other roles than 'tool'")
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns what chat templates expect: plain text, and the roles `system` for OpenAI's `developer` and `tool`
        for `function`."""
        parts = self.content or self.refusal or (self.audio and self.audio.transcript) or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        thoughts = [part.thought for part in parts if isinstance(part, ThinkingPart)]
        calls = list(self.tool_calls or ())
        if self.function_call is not None:
            calls.append(FunctionCall(id=f"call_{self.function_call.name}", function=self.function_call))
        fields: dict[str, Any] = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in calls] or None,
            "reasoning_content": self.reasoning_content or "\n".join(filter(None, thoughts)) or self.reasoning_content,
        }
        return {"role": ROLES.get(self.role, self.role), "content": content} | {
            name: value for name, value in fields.items() if value is not None
        }


class Prediction(Body):
    """What the answer will be for the most part, such as a file that is to be edited."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_LIST, fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(SamplingFields, ThinkingFields):
    table = chat.TABLE

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)]
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS), known_tools(CHAT_TOOLS, "tools")] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's fields, which say how the chat template is rendered.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> ChatRequest:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise bad_parameter("max_tokens", "differs from max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise bad_parameter("top_logprobs", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_parameter("add_generation_prompt", "cannot be combined with continue_final_message")
        return self


MAX_PROMPTS = 128
MAX_TOKEN_ID = 2**31 - 1


def texts_or_tokens(field: str, most: int, value: Any) -> list[str] | list[list[int]]:
    """Returns a string, token ids, or a list of either, as a list. Raises ApiError for anything else.

    This is written by hand, because pydantic collects the errors of every branch of a union at every element. That
    takes half a minute for a long list.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise bad_parameter(field, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if len(value) > most:
        raise bad_parameter(field, f"has {len(value)} {field}s; the limit is {most}")
    for i, each in enumerate(value):
        if not isinstance(each, (str, list)) or type(each) is not type(value[0]):
            raise bad_parameter(f"{field}.{i}", "must be of the same kind as the others, text or token ids")
        if not each:
            raise bad_parameter(f"{field}.{i}", "must not be empty")
        for token_id in each if isinstance(each, list) else ():
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                raise bad_parameter(f"{field}.{i}", f"must be a list of token ids, got {str(token_id)[:40]!r}")
    return value


def one_kind_of_input(field: str, most: int) -> PlainValidator:
    """Checks a field by `texts_or_tokens`. The OpenAPI document shows the union that pydantic would check."""
    text = Annotated[str, Field(min_length=1)]
    tokens = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(min_length=1)]
    several = Field(min_length=1, max_length=most)
    described = text | tokens | Annotated[list[text], several] | Annotated[list[tokens], several]

    def check(value: Any, info: ValidationInfo) -> list[str] | list[list[int]]:
        """Before a suffix there may be nothing."""
        is_before = value == "" and bool(info.data.get("suffix"))
        return [""] if is_before else texts_or_tokens(field, most, value)

    return PlainValidator(check, json_schema_input_type=described)


DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions; null is no limit, as in vLLM. Chat has none."""


class CompletionRequest(SamplingFields):
    table = completions.TABLE

    suffix: str | None = None  # before the prompt, whose check reads it
    prompt: Annotated[list[str] | list[list[int]], one_kind_of_input("prompt", MAX_PROMPTS)]
    max_tokens: TokenLimit = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    split_special_tokens: bool | None = None  # control tokens in the prompt are text

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        if self.num_candidates < (self.n or 1):
            raise bad_parameter("best_of", f"must be at least n, which is {self.n}")
        if self.num_candidates > (self.n or 1) and self.stream:
            raise bad_parameter("best_of", "must equal n if stream is true: the best answers are known only at the end")
        return self

    @property
    def num_candidates(self) -> int:
        return self.best_of or self.n or 1

    @property
    def multiplier(self) -> str | None:
        return "best_of" if self.num_candidates > (self.n or 1) else super().multiplier
