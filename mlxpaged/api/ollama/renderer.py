"""Renders answers in Ollama's format, whole or as lines of JSON. A tool call is one line, when it is complete."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation import deltas
from mlxpaged.api.generation.answers import Answer, Answers, Renderer, progress_field, timeline_field
from mlxpaged.api.generation.logprobs import described
from mlxpaged.api.generation.tool_calls import call_arguments
from mlxpaged.api.ollama.errors import error_body
from mlxpaged.api.ollama.schema import GeneratingFields
from mlxpaged.api.streaming import LINES, Beginning, line
from mlxpaged.core.engine.logprobs import TokenLogprobs
from mlxpaged.core.engine.prompt_progress import PromptProgress
from mlxpaged.core.engine.timeline import Timeline


class OllamaRenderer(Renderer):
    """Renders one answer."""

    media_type = LINES

    def __init__(self, answers: Answers, body: GeneratingFields) -> None:
        self._answers = answers
        self._model = body.model
        self._shows_logprobs = bool(body.logprobs)

    @abstractmethod
    def said(self, text: str, others: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a text. others: "thinking" and "tool_calls", if there are any."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        [answer] = answers
        text, thinking = (
            "".join(part.text for part in answer.parts if part.kind is kind) for kind in (deltas.Text, deltas.Thinking)
        )
        calls = [call(part.kind) for part in answer.parts if isinstance(part.kind, deltas.ToolCall)]
        others: dict[str, Any] = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return self._line(text, others, answer.logprobs) | self._end(answer.finish)

    def events(self, update: deltas.Update) -> Iterator[str]:
        pieces = [piece(delta) for delta in update.deltas]
        if update.logprobs and self._shows_logprobs and not pieces:
            pieces = [("", {})]
        logprobs = update.logprobs
        for text, others in pieces:
            yield line(self._line(text, others, logprobs))
            logprobs = ()
        if update.finish is not None:
            yield line(self._line("", {}) | self._end(update.finish))

    def keep_alive(self, progress: PromptProgress) -> str:
        """Returns a line without text, which every client takes: lines of JSON have no comments."""
        return line(self._line("", {}))

    def progress(self, progress: PromptProgress) -> str:
        return line(self._line("", {}) | progress_field(progress))

    def error(self, error: ApiError) -> str:
        return line(error_body(error, self._answers.context.request_id))

    def _line(self, text: str, others: dict[str, Any], logprobs: Sequence[TokenLogprobs] = ()) -> dict[str, Any]:
        fields = {"model": self._model, "created_at": timestamp(), **self.said(text, others), "done": False}
        if not (self._shows_logprobs and logprobs):
            return fields
        return fields | {"logprobs": described(self._answers.info.tokenizer, logprobs)}

    def _end(self, finish: deltas.Finish) -> dict[str, Any]:
        """Returns the fields of the last line. Times are nanoseconds. load_duration: the time in the queue, because the
        model is loaded before the server takes requests."""
        usage, timeline = self._answers.usage, finish.timeline
        assert timeline is not None
        return {
            "done": True,
            "done_reason": finish.reason,
            "total_duration": nanoseconds(timeline.total_seconds),
            "load_duration": nanoseconds(timeline.queued_seconds),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": nanoseconds(timeline.prefill_seconds),
            "eval_count": usage.completion,
            "eval_duration": nanoseconds(timeline.decode_seconds),
            **self._timeline(timeline),
        }

    def _timeline(self, timeline: Timeline) -> dict[str, Any]:
        return timeline_field([timeline]) if self._answers.context.timeline else {}


class OllamaBeginning(Beginning):
    """nothing: what a line without text has."""

    nothing: ClassVar[Mapping[str, Any]]

    def __init__(self, request_id: str, model: str, named: str | None) -> None:
        self._model = named  # as in the lines of the answer

    def go_on(self) -> str:
        return line({"model": self._model, "created_at": timestamp(), **self.nothing, "done": False})


class ChatBeginning(OllamaBeginning):
    nothing: ClassVar[Mapping[str, Any]] = {"message": {"role": "assistant", "content": ""}}


class GenerateBeginning(OllamaBeginning):
    nothing: ClassVar[Mapping[str, Any]] = {"response": ""}


class ChatRenderer(OllamaRenderer):
    def said(self, text: str, others: dict[str, Any]) -> dict[str, Any]:
        return message(text, others)


class GenerateRenderer(OllamaRenderer):
    def said(self, text: str, others: dict[str, Any]) -> dict[str, Any]:
        return {"response": text} | others


def message(text: str, others: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text} | others}


def piece(delta: deltas.Delta) -> tuple[str, dict[str, Any]]:
    """Returns the text and the other fields that a delta adds."""
    match delta:
        case deltas.Text(text):
            return text, {}
        case deltas.Thinking(text):
            return "", {"thinking": text}
    return "", {"tool_calls": [call(delta)]}


def call(made: deltas.ToolCall) -> dict[str, Any]:
    function = {"index": made.index, "name": made.name, "arguments": call_arguments(made.text)}
    return {"id": made.call_id, "function": function}


def timestamp(seconds: float | None = None) -> str:
    """Returns a Unix time, by default the present one, in the form of RFC 3339. It always has a fraction: OllamaKit of
    Swift reads no other."""
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
