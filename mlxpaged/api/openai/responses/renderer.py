"""Renders an answer in the format of the responses API, as one object or as events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from mlxpaged.api.errors import ApiError
from mlxpaged.api.foreign import OtherTool
from mlxpaged.api.generation import deltas
from mlxpaged.api.generation.answers import (
    MANY_LOGPROBS,
    Answer,
    Answers,
    Renderer,
    num_logprobs,
    progress_field,
    timeline_field,
)
from mlxpaged.api.generation.logprobs import described
from mlxpaged.api.generation.request import INPUT
from mlxpaged.api.openai.responses.beginning import ResponseBeginning
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.responses.tools import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
)
from mlxpaged.api.request_id import new_id, response_id_of
from mlxpaged.api.streaming import named_event
from mlxpaged.core.engine.prompt_progress import PromptProgress

Event = tuple[str, dict[str, Any]]
"""The type of an event without "response.", and its fields."""
LIMITS = {"max_output_tokens", "max_tool_calls"}
REPEATED = {"instructions", "previous_response_id", "user", "safety_identifier", "prompt_cache_key", *LIMITS}
"""The response repeats these fields of the request."""


class ResponseRenderer(Renderer):
    """called_as: what calls of each tool have in the API. keep: called with the complete response, before it is sent.
    beginning: of a stream that waited for its model. repeats_much: as in Renderer."""

    def __init__(
        self,
        answers: Answers,
        body: ResponseRequest,
        called_as: Mapping[str, dict[str, str]],
        keep: Callable[[dict[str, Any]], None],
        beginning: ResponseBeginning | None,
        repeats_much: bool = False,
    ) -> None:
        self.repeats_much = repeats_much
        self._answers = answers
        self._body = body
        self._keep = keep
        self._created = int(time.time()) if beginning is None else beginning.created
        self._output = OutputItems(called_as)
        self._num_logprobs = 0
        self._sequence_number = -1 if beginning is None else beginning.num_events - 1  # of the last event

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        for update in answers[0].updates:
            for _, fields in self._made(update):
                response: dict[str, Any] | None = fields.get("response")
        assert response is not None
        return response

    def begin(self) -> Iterator[str]:
        if self._sequence_number < 0:
            yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def events(self, update: deltas.Update) -> Iterator[str]:
        for kind, fields in self._made(update):
            yield self._event(kind, **fields)

    def keep_alive(self, progress: PromptProgress) -> str:
        """Returns an event with its comment: Codex gives a stream up that has no event for five minutes."""
        return super().keep_alive(progress) + self._event("in_progress", response=self._response("in_progress"))

    def progress(self, progress: PromptProgress) -> str:
        return self._event("in_progress", response=self._response("in_progress"), **progress_field(progress))

    def error(self, error: ApiError) -> str:
        details = {"code": error.code or error.kind, "message": error.message}
        return self._event("failed", response=self._response("failed", error=details, output=self._output.items))

    def _made(self, update: deltas.Update) -> Iterator[Event]:
        """Yields the events of an update. The last event of the last update has the response."""
        logprobs: list[dict[str, Any]] = []
        if self._body.wants_logprobs and not update.thinking:
            logprobs = [*described(self._answers.info.tokenizer, update.logprobs)]
            self._num_logprobs += num_logprobs(update)
        yield from self._output.add(update.deltas, logprobs)
        if update.finish is not None:
            complete = update.finish.reason == "stop"
            yield from self._output.finish(complete)
            response = self._finished(complete, update.finish)
            yield response["status"], {"response": response}

    def is_large(self, update: deltas.Update) -> bool:
        """The last events have the whole answer."""
        many = self._num_logprobs + num_logprobs(update) > MANY_LOGPROBS
        return super().is_large(update) or (many and update.finish is not None)

    def _finished(self, complete: bool, finish: deltas.Finish) -> dict[str, Any]:
        usage = self._answers.usage
        response = self._response(
            "completed" if complete else "incomplete",
            output=self._output.items,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            completed_at=int(time.time()) if complete else None,
            usage={
                "input_tokens": usage.prompt,
                # Writing to the cache is free.
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.thinking},
                "total_tokens": usage.prompt + usage.completion,
            },
            **timeline_field([finish.timeline]),
        )
        self._keep(response)
        return response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body = self._body
        text, reasoning, choice = shown(body.text), shown(body.reasoning), body.tool_choice
        response: dict[str, Any] = {
            "id": response_id_of(self._answers.context.request_id),
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._answers.model,
            "output": [],
            "usage": None,
            **body.model_dump(include=REPEATED),
            "temperature": self._answers.params.temperature,
            "top_p": self._answers.params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "metadata": body.metadata or {},
            "service_tier": self._answers.context.service_tier,
            "store": body.kept,
            "background": False,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
            "reasoning": {"effort": None, "summary": None} | reasoning,
            "tools": [shown_tool(tool) for tool in body.tools or () if not isinstance(tool, OtherTool)],
            "tool_choice": shown(choice) if isinstance(choice, BaseModel) else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        }
        return response | fields

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence_number += 1
        return named_event({"type": f"response.{kind}", "sequence_number": self._sequence_number, **fields})


def shown(model: BaseModel | None) -> dict[str, Any]:
    """Returns a part of the request, as the response repeats it."""
    return {} if model is None else model.model_dump(by_alias=True, exclude_none=True)


def shown_tool(tool: FunctionTool | NamespaceTool | CustomTool) -> dict[str, Any]:
    defaults = {"description": None, "parameters": None, "strict": False}
    return (defaults if isinstance(tool, FunctionTool) else {}) | shown(tool)


def text_of(arguments: str) -> str:
    """Returns the text for a custom tool. A model may give its only argument another name."""
    given = json.loads(arguments)
    texts = [given.get(INPUT), *given.values()] if len(given) == 1 else [given.get(INPUT)]
    return next((text for text in texts if isinstance(text, str)), arguments)


class OutputItems:
    """Makes the output items from the deltas of an answer. Use an event before you ask for the next: its item grows."""

    def __init__(self, called_as: Mapping[str, dict[str, str]]) -> None:
        """called_as: by a tool's name for the model, what its calls have in the API."""
        self._called_as = called_as
        self.items: list[dict[str, Any]] = []
        """The items that are done."""
        self._open: dict[str, Any] = {}  # the item that is being made, if any
        self._index = -1  # of the open item, among all that were announced
        self._texts: list[str] = []  # of the open item, until it is done: to append to one text copies it
        self._logprobs: list[dict[str, Any]] = []  # of tokens that have not become text

    def add(self, made: list[deltas.Delta], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """logprobs: of the tokens that came with these deltas. They stay with the text that the tokens become."""
        self._logprobs += logprobs
        for delta in made:
            match delta:
                case deltas.Text(text):
                    yield from self._add_text(text)
                case deltas.Thinking(text):
                    self._logprobs = []
                    if self._open.get("type") != "reasoning":
                        item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
                        yield from self._begin(item, {"type": "reasoning_text", "text": ""})
                    self._texts.append(text)
                    yield "reasoning_text.delta", self._place(content_index=0, delta=text)
                case deltas.ToolCall(_, call_id, name, text):
                    yield from self._add_call(
                        {"type": "function_call", "call_id": call_id, **self._called_as[name]}, text
                    )

    def finish(self, complete: bool) -> Iterator[Event]:
        """complete: whether the answer came to its end. An answer without items is an empty message."""
        if (self._open.get("type") == "message" and self._logprobs) or not (self.items or self._open):
            yield from self._add_text("")
        yield from self._end("completed" if complete else "incomplete")

    def _add_call(self, call: dict[str, Any], text: str) -> Iterator[Event]:
        """text: the arguments."""
        prefix, field, kind = "fc", "arguments", "function_call_arguments"
        if call["type"] == "custom_tool_call":
            prefix, field, kind, text = "ctc", "input", "custom_tool_call_input", text_of(text)
        yield from self._begin({"id": new_id(prefix), **call, field: ""})
        self._open[field] = text
        yield f"{kind}.delta", self._place(delta=text)
        self._logprobs = []
        yield from self._end("completed")

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._open.get("type") != "message":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
            yield from self._begin(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        logprobs, self._logprobs = self._logprobs, []
        part = self._open["content"][0]
        self._texts.append(text)
        part["logprobs"] += logprobs
        if text or logprobs:
            yield "output_text.delta", self._place(content_index=0, delta=text, logprobs=logprobs)

    def _begin(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[Event]:
        """part: the only part of its content, if it has content."""
        yield from self._end("completed")
        self._index += 1
        self._open = item | ({} if part is None else {"content": []}) | {"status": "in_progress"}
        yield "output_item.added", {"output_index": self._index, "item": self._open}
        if part is not None:
            self._open["content"].append(part)
            yield "content_part.added", self._place(content_index=0, part=part)

    def _end(self, status: str) -> Iterator[Event]:
        item, place = self._open, self._place(content_index=0)
        if not item:
            return
        if item["type"] == "function_call":
            # Clients from before 2026 require the name.
            yield "function_call_arguments.done", self._place(name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            yield "custom_tool_call_input.done", self._place(input=item["input"])
        else:
            part = item["content"][0]
            part["text"], self._texts = "".join(self._texts), []
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"{part['type']}.done", place | said
            yield "content_part.done", place | {"part": part}
        item["status"] = status
        self.items.append(item)
        self._open = {}
        yield "output_item.done", {"output_index": self._index, "item": item}

    def _place(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self._open.get("id"), "output_index": self._index, **fields}
