"""Defines the neutral request for text. Each API translates its own requests into it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.media import Shown
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.formats.pieces import LARK, Grammar
from mlxpaged.vision.image import PromptImage

MAX_LOGPROBS = 500_000
"""Log-probabilities in the answers to a request: of each token, and of the most likely ones in its place. One takes 12
bytes until the answer is complete, then 70 bytes of JSON, and 4 us to be written."""

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool without parameters, as OpenAI defines it."""
INPUT = "input"
"""The only argument of a tool that takes one text."""
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. param: the client's field that defines it. grammar: of its argument INPUT, in
    Lark's notation, for a tool that takes one text."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    param: str
    grammar: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Returns the schema that calls fit where they are enforced."""
        if self.grammar is not None:
            return INPUT_SCHEMA | {"properties": {INPUT: {"type": "string", LARK: Grammar(self.grammar)}}}
        return NO_ARGUMENTS if self.parameters is None else self.parameters

    def for_template(self) -> dict[str, Any]:
        """Returns OpenAI's form without missing fields, which chat templates expect."""
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name} | given}


@dataclass(frozen=True)
class ToolChoice:
    """mode: whether the model may or must call. named: the only tool that it may call; the mode is then "required".
    allowed: the tools that it is told of, by name; None for all."""

    mode: Literal["none", "auto", "required"] = "auto"
    named: str | None = None
    allowed: Sequence[str] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation to be answered.

    messages: as chat templates expect them. media: what in them is no text. enable_thinking: the template's switch;
    None leaves it as it is. asks_thinking, needs_thinking: a model that does not think answers without, and the client
    is told so; or it is refused. effort: of the thinking, for templates that know it. one_call: end the answer after
    its first call. prediction: what the answer will be for the most part.
    """

    messages: list[dict[str, Any]]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    one_call: bool = False
    enable_thinking: bool | None = None
    asks_thinking: bool = False
    needs_thinking: bool = False
    effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    media: Sequence[Shown] = ()
    prediction: str = ""

    @property
    def num_chars(self) -> int:
        """Returns the characters of its texts."""
        sentinels = sum(len(each.sentinel) for each in self.media)
        return sum(len(message["content"]) for message in self.messages) - sentinels

    @property
    def offered_tools(self) -> list[Tool]:
        """Returns the tools that the model is told of."""
        if self.tool_choice.mode == "none":
            return []
        if self.tool_choice.allowed is None:
            return list(self.tools)
        allowed = set(self.tool_choice.allowed)
        return [tool for tool in self.tools if tool.name in allowed]


@dataclass(frozen=True)
class GenerationRequest:
    """prompt: a conversation, or texts or token ids to continue. n: answers to show per prompt. candidates: answers to
    generate per prompt, of which the likeliest n are shown. adapters: name of an adapter; the model's name may have one
    too. cache_salt: only requests with the same one share prefixes. split_special_tokens: control tokens in texts to
    continue are text, as they always are in a conversation. echo: the answers begin with their prompts. suffix: the
    text after the answers, which fill in what is between the prompts and it. timeout, ttft_timeout: seconds; None for
    the server's default. timed: the answers need their timelines, even if the client does not ask for them.
    return_progress: whether a stream tells its progress. thinking_limit: that of the profile, if the client sets none.
    most_logprobs: of all answers, if these are collected; None if each is sent as it comes. chosen: names of the
    sampling parameters that the client has set. client_names: the client's names of fields that have other names here.
    of_prompts, images: of each prompt of token ids, in place of `params` and of none. num_counted: of each prompt,
    tokens that count as used by the key; empty if all do."""

    prompt: Chat | list[str] | list[list[int]]
    params: SamplingParams
    model: str | None = None
    adapters: str | None = None
    cache_salt: str = ""
    split_special_tokens: bool = False
    n: int = 1
    candidates: int = 1
    echo: bool = False
    suffix: str = ""
    service_tier: str | None = None
    timeout: float | None = None
    ttft_timeout: float | None = None
    timed: bool = False
    return_progress: bool = False
    thinking_limit: ThinkingLimit | None = None
    most_logprobs: int | None = MAX_LOGPROBS
    chosen: frozenset[str] = frozenset()
    client_names: Mapping[str, str] = field(default_factory=dict)
    of_prompts: Sequence[SamplingParams] = ()
    images: Sequence[tuple[PromptImage, ...]] = ()
    num_counted: Sequence[int] = ()

    @classmethod
    def of(cls, body: BaseModel, **others: Any) -> GenerationRequest:
        """Takes the body's fields by name. others: fields that have another name or another meaning there."""
        chosen = frozenset(given_fields(body, SamplingParams))
        return cls(**{"chosen": chosen} | given_fields(body, cls) | others)

    def with_defaults(self, defaults: Mapping[str, float]) -> GenerationRequest:
        """Takes the sampling parameters that the client has not set from `defaults`."""
        missing: dict[str, Any] = {name: value for name, value in defaults.items() if name not in self.chosen}
        return dataclasses.replace(self, params=dataclasses.replace(self.params, **missing))

    def client_name(self, name: str) -> str:
        """Returns the client's name of the field `name`."""
        return self.client_names.get(name, name)

    def refusal(self, name: str, message: str, code: str | None = None, reason: str | None = None) -> ApiError:
        """Returns the error that says what is wrong with the field `name`. reason: as in ApiError."""
        return bad_parameter(self.client_name(name), message, code, reason)


def function_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Returns a call in OpenAI's form. Chat templates expect the same form, with the arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of an earlier call as an object, which chat templates expect. Nothing and `null` are no
    arguments. A text that is no object is the only argument of it. Half a surrogate pair becomes U+FFFD."""
    try:
        value = json.loads(arguments or "{}") if not isinstance(arguments, dict) else arguments
        value = json.loads(
            json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    except (ValueError, RecursionError):
        value = arguments
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": arguments}


ENGINE_TYPES: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda value: max(0, value),
    "logit_bias": lambda value: {int(token): bias for token, bias in value.items()},
    "stop": tuple,
    "stop_token_ids": frozenset,
}
"""Converts the fields whose type in the engine is not that of JSON."""


def sampling_params(body: BaseModel, **others: Any) -> SamplingParams:
    """Takes the body's fields by name. others: parameters that have another name or another meaning there."""
    fields = given_fields(body, SamplingParams)
    converted = {name: ENGINE_TYPES[name](value) for name, value in fields.items() if name in ENGINE_TYPES}
    return SamplingParams(**fields | converted | others)


def given_fields(body: BaseModel, kind: type[SamplingParams] | type[GenerationRequest]) -> dict[str, Any]:
    """Returns the fields of a body that `kind` has under the same name, without missing ones."""
    names = {each.name for each in dataclasses.fields(kind)} & set(type(body).model_fields)
    return {name: value for name in names if (value := getattr(body, name)) is not None}
