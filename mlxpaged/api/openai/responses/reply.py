"""The answer in the format of the responses API: one object, or the events of its making."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pydantic import BaseModel

from mlxpaged.api.conversation import Conversation
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import timeline_field
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.responses.output import Event, OutputItems
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.responses.tools import FunctionTool, NamespaceTool, WebSearchTool, called_as
from mlxpaged.api.streaming import event
from mlxpaged.engine import RequestOutput
from mlxpaged.scheduler import FinishReason


class ResponseReply:
    """keep: called with the complete response, before anybody sees it."""

    def __init__(
        self, conversation: Conversation, body: ResponseRequest, keep: Callable[[dict[str, Any]], None]
    ) -> None:
        self._info = conversation.info
        self._terms = conversation.terms
        self._generation = conversation.generation
        self._parser = conversation.new_parser()
        self._body = body
        self._keep = keep
        self._created = int(time.time())
        self._output = OutputItems(called_as(body.tools))
        self._reasoning_tokens = 0
        self._sequence_number = 0

    async def complete(self) -> dict[str, Any]:
        async for _, fields in self._made():
            response: dict[str, Any] | None = fields.get("response")
        assert response is not None
        return response

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))
            async for kind, fields in self._made():
                yield self._event(kind, **fields)
        except Exception as error:
            failure = from_engine(error)
            details = {"code": failure.code or failure.kind, "message": failure.message}
            yield self._event("failed", response=self._response("failed", error=details, output=self._output.items))

    async def _made(self) -> AsyncGenerator[Event, None]:
        """The last event has the response."""
        async for _, output in self._generation.outputs():
            for each in self._output.add(*self._read(output)):
                yield each
            if output.finish_reason is not None:
                complete = output.finish_reason is FinishReason.STOP
                for each in self._output.finish(complete):
                    yield each
                response = self._finished(complete, output)
                yield response["status"], {"response": response}

    def _read(self, output: RequestOutput) -> tuple[list[Any], list[dict[str, Any]]]:
        """The parts of the answer that are certain by now, and the log-probabilities of tokens that may be text."""
        thinking = self._parser.thinks
        parts = self._parser.feed(output.text)
        thinking |= self._parser.thinks
        if thinking:
            self._reasoning_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            parts += self._parser.finish()
        if thinking or not self._body.wants_logprobs:
            return parts, []
        return parts, chat_logprobs(self._info.tokenizer, output.logprobs)["content"]

    def _finished(self, complete: bool, last: RequestOutput) -> dict[str, Any]:
        usage = self._generation.usage()
        response = self._response(
            "completed" if complete else "incomplete",
            output=self._output.items,
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            completed_at=int(time.time()) if complete else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                # Nothing is charged for what is written to the cache.
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
            **timeline_field([last.timeline]),
        )
        self._keep(response)
        return response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body = self._body
        text, reasoning, choice = shown(body.text), shown(body.reasoning), body.tool_choice
        response: dict[str, Any] = {
            "id": self._terms.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._info.model,
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
            "service_tier": self._terms.service_tier,
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
