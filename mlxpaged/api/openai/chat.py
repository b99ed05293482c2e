"""Handles POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.generation.answers import Answer, Answers, reply
from mlxpaged.api.generation.deltas import Delta, Finish, Text, Thinking, ToolCall, Update
from mlxpaged.api.generation.request import MAX_LOGPROBS, Chat, GenerationRequest, function_call, sampling_params
from mlxpaged.api.generation.submission import start
from mlxpaged.api.media import media_of
from mlxpaged.api.openai.renderer import ChunkBeginning, CompletionsRenderer, chat_logprobs, usage_field
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.openai.thinking import ThinkingFields
from mlxpaged.api.openai.tools import FunctionTool, NamedTool, translated_choice
from mlxpaged.core.engine.logprobs import TokenLogprobs

THINKING = tuple(ThinkingFields.model_fields)


async def respond(request: Request, body: ChatRequest) -> Response:
    answers = await start(request, lambda: translate(body), "chatcmpl")
    beginning: ChunkBeginning | None = getattr(request.state, "beginning", None)
    return await reply(answers, ChatRenderer(answers, body, beginning), bool(body.stream))


def translate(body: ChatRequest) -> GenerationRequest:
    """Raises ApiError."""
    variables = body.chat_template_kwargs or {}
    form = body.response_format.constraint("response_format") if body.response_format is not None else None
    chat = Chat(
        messages=[message.for_template() for message in body.messages],
        media=media_of(body.messages, "messages"),
        tools=[
            tool.function.translated(f"tools.{index}")
            for index, tool in enumerate(body.tools or ())
            if isinstance(tool, FunctionTool)
        ],
        tool_choice=translated_choice(body.tool_choice),
        one_call=body.parallel_tool_calls is False,
        enable_thinking=body.enables_thinking,
        effort=body.effort,
        asks_thinking=body.asks_thinking or variables.get("enable_thinking") is True,
        chat_template_kwargs=variables,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message or body.messages[-1].prefix),
        prediction="" if body.prediction is None else body.prediction.text,
    )
    params = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        thinking_budget=body.budget,
        constraint=body.constraint(form),
    )
    client_names = {
        "max_tokens": "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        "thinking": next(
            (name for name in THINKING if getattr(body, name) is not None), "chat_template_kwargs.enable_thinking"
        ),
        "candidates": "n",
    }
    return GenerationRequest.of(
        body,
        prompt=chat,
        params=params,
        candidates=body.num_candidates,
        most_logprobs=None if body.stream else MAX_LOGPROBS,
        client_names=client_names,
    )


class ChatBeginning(ChunkBeginning):
    kind = "chat.completion.chunk"
    nothing: ClassVar[Mapping[str, Any]] = {"delta": {}}


class ChatRenderer(CompletionsRenderer):
    def __init__(self, answers: Answers, body: ChatRequest, beginning: ChunkBeginning | None) -> None:
        super().__init__(answers, body, "chat.completion", ChatBeginning.kind, beginning)
        self._shows_logprobs = bool(body.logprobs)
        self._names_tool = isinstance(body.tool_choice, NamedTool)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """All choices have the same prompt, so its log-probabilities stand beside them."""
        return super().whole(answers) | self.prompt_logprobs_field(answers[0])

    def usage(self) -> dict[str, Any]:
        usage = self.answers.usage
        return usage_field(usage, reasoning_tokens=usage.thinking)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        parts = answer.parts
        text, thinking = ("".join(part.text for part in parts if part.kind is kind) for kind in (Text, Thinking))
        made = [part.kind for part in parts if isinstance(part.kind, ToolCall)]
        calls = [function_call(call.call_id, call.name, call.text) for call in made]
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": self._finish_reason(answer.finish),
        }

    def begin(self) -> Iterator[str]:
        for index in range(self.answers.num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def events(self, update: Update) -> Iterator[str]:
        deltas = [fields for delta in update.deltas for fields in delta_fields(delta)]
        if update.logprobs and not deltas:
            deltas = [{"content": ""}]
        logprobs = self._logprobs(update.logprobs)
        for fields in deltas:
            yield self._chunk(update.choice, fields, logprobs)
            logprobs = None
        if update.finish is not None:
            yield self._chunk(update.choice, {}, finish_reason=self._finish_reason(update.finish))

    def empty_chunk(self, index: int) -> str:
        return self._chunk(index, {})

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> str:
        return self.chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason})

    def _finish_reason(self, finish: Finish) -> str:
        """The reason in OpenAI's API, where a call of the tool that `tool_choice` names ends with "stop"."""
        calls = finish.num_calls and not self._names_tool
        return "tool_calls" if finish.reason == "stop" and calls else finish.reason

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self.answers.info.tokenizer, tokens) if self._shows_logprobs else None


def delta_fields(delta: Delta) -> list[dict[str, Any]]:
    """Returns what a delta adds to a message, by chunks. Some clients take only the name from a call's first chunk."""
    match delta:
        case Text(text):
            return [{"content": text}]
        case Thinking(text):
            return [{"reasoning_content": text}]
    begun = {"index": delta.index, **function_call(delta.call_id, delta.name, "")}
    return [{"tool_calls": [each]} for each in (begun, {"index": delta.index, "function": {"arguments": delta.text}})]
