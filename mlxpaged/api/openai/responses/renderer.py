"""The answer in the format of the responses API: one object, or events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.answers import Answer, Answers, timeline_field
from mlxpaged.api.generation.deltas import Finish, Update
from mlxpaged.api.generation.reply import Renderer
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.responses.output import Event, OutputItems
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.responses.tools import FunctionTool, NamespaceTool, WebSearchTool, functions
from mlxpaged.api.streaming import event


class ResponseRenderer(Renderer):
    """keep: called with the complete response, before it is sent."""

    def __init__(self, answers: Answers, body: ResponseRequest, keep: Callable[[dict[str, Any]], None]) -> None:
        self._answers = answers
        self._body = body
        self._keep = keep
        self._created = int(time.time())
        self._output = OutputItems({tool.name: called_as for tool, called_as in functions(body.tools)})
        self._sequence_number = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        for update in answers[0].updates:
            for _, fields in self._made(update):
                response: dict[str, Any] | None = fields.get("response")
        assert response is not None
        return response

    def begin(self) -> Iterator[str]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def events(self, update: Update) -> Iterator[str]:
        for kind, fields in self._made(update):
            yield self._event(kind, **fields)

    def error(self, error: ApiError) -> str:
        details = {"code": error.code or error.kind, "message": error.message}
        return self._event("failed", response=self._response("failed", error=details, output=self._output.items))

    def _made(self, update: Update) -> Iterator[Event]:
        """The last event of the last update has the response."""
        logprobs: list[dict[str, Any]] = []
        if self._body.wants_logprobs and not update.thinking:
            logprobs = chat_logprobs(self._answers.info.tokenizer, update.logprobs)["content"]
        yield from self._output.add(update.deltas, logprobs)
        if update.finish is not None:
            complete = update.finish.reason == "stop"
            yield from self._output.finish(complete)
            response = self._finished(complete, update.finish)
            yield response["status"], {"response": response}

    def _finished(self, complete: bool, finish: Finish) -> dict[str, Any]:
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
            "id": self._answers.context.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._answers.info.model,
            "output": [],
            "usage": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "metadata": body.metadata or {},
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": self._answers.context.service_tier,
            "store": body.kept,
            "background": False,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}, "verbosity": "medium"} | text,
            "reasoning": {"effort": None, "summary": None} | reasoning,
            "tools": [shown_tool(tool) for tool in body.tools or () if not isinstance(tool, WebSearchTool)],
            "tool_choice": shown(choice) if isinstance(choice, BaseModel) else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        }
        return response | fields

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": f"response.{kind}", "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: response.{kind}\n{event(data)}"


def shown(model: BaseModel | None) -> dict[str, Any]:
    """A part of the request, as the response repeats it."""
    return {} if model is None else model.model_dump(by_alias=True, exclude_none=True)


def shown_tool(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    defaults = {"description": None, "parameters": None, "strict": False}
    return (defaults if isinstance(tool, FunctionTool) else {}) | shown(tool)
