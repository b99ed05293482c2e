"""Renders a message in Anthropic's format, whole or as events. A block of a stream stops before the next one starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxpaged.api.anthropic.errors import error_body
from mlxpaged.api.anthropic.signature import seal, signature
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation import deltas
from mlxpaged.api.generation.answers import (
    Answer,
    Answers,
    Renderer,
    progress_comment,
    progress_field,
    timeline_field,
)
from mlxpaged.api.generation.tool_calls import call_arguments
from mlxpaged.api.streaming import named_event
from mlxpaged.core.engine.prompt_progress import PromptProgress


class MessageRenderer(Renderer):
    """Renders one answer. omit_thinking: whether thinking blocks leave out their text."""

    def __init__(self, answers: Answers, omit_thinking: bool) -> None:
        self._answers = answers
        self._omit_thinking = omit_thinking
        self._started = False
        self._index = -1
        self._open: str | None = None  # the type of the block that has started
        self._thinking = ""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        finish = answers[0].finish
        blocks = [content_block(part, self._omit_thinking) for part in answers[0].parts]
        return self._message(blocks, stop_reason(finish)) | timeline_field([finish.timeline])

    def events(self, update: deltas.Update) -> Iterator[str]:
        # Not earlier: the first output says how much of the prompt was cached. After a long silence it comes all the
        # same, because clients expect it before a ping; the message_delta at the end has the final counts.
        if not self._started:
            self._started = True
            message = self._message([], {"stop_reason": None, "stop_sequence": None})
            yield named_event({"type": "message_start", "message": message})
        for delta in update.deltas:
            yield from map(named_event, self._add(delta))
        if update.finish is not None:
            yield from map(named_event, self._close())
            last = {"type": "message_delta", "delta": stop_reason(update.finish), "usage": self._usage()}
            yield named_event(last | timeline_field([update.finish.timeline]))

    def end(self) -> Iterator[str]:
        yield named_event({"type": "message_stop"})

    def keep_alive(self, progress: PromptProgress) -> str:
        """Returns a ping, because some clients of this API count events, but not comments."""
        return progress_comment(progress) + named_event({"type": "ping"})

    def progress(self, progress: PromptProgress) -> str:
        return named_event({"type": "ping"} | progress_field(progress))

    def error(self, error: ApiError) -> str:
        return named_event(error_body(error, self._answers.context.request_id))

    def _add(self, delta: deltas.Delta) -> Iterator[dict[str, Any]]:
        match delta:
            case deltas.Text(text):
                yield from self._start("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case deltas.Thinking(text):
                yield from self._start("thinking", {"thinking": "", "signature": ""})
                self._thinking += text
                if not self._omit_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case deltas.ToolCall(_, call_id, name, text):
                yield from self._close()
                yield from self._start("tool_use", {"id": call_id, "name": name, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _close(self) -> Iterator[dict[str, Any]]:
        """Stop the block that has started, if any."""
        if self._open is None:
            return
        if self._open == "thinking":
            sign = seal if self._omit_thinking else signature
            yield self._delta({"type": "signature_delta", "signature": sign(self._thinking)})
            self._thinking = ""
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _start(self, kind: str, content: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Start a block of that type, unless one has started."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind} | content}
        if self._index == 0:
            yield {"type": "ping"}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message(self, content: list[dict[str, Any]], reason: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._answers.context.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._answers.model,
            "content": content,
            **reason,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Returns the usage so far. A token of the prompt counts either as read from the cache, or as input."""
        usage = self._answers.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": usage.thinking},
        }


def stop_reason(finish: deltas.Finish) -> dict[str, Any]:
    if finish.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
    ended = "tool_use" if finish.num_calls else "end_turn"
    return {"stop_reason": "max_tokens" if finish.reason == "length" else ended, "stop_sequence": None}


def content_block(part: deltas.Part, omit_thinking: bool) -> dict[str, Any]:
    if isinstance(part.kind, deltas.ToolCall):
        arguments = call_arguments(part.text)
        return {"type": "tool_use", "id": part.kind.call_id, "name": part.kind.name, "input": arguments}
    if part.kind is deltas.Text:
        return {"type": "text", "text": part.text}
    sign, shown = (seal, "") if omit_thinking else (signature, part.text)
    return {"type": "thinking", "thinking": shown, "signature": sign(part.text)}
