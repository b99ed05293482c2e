"""The answer in the format of the responses API: one object, or the events of its making."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Choice, Generation, timeline_field
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.responses.schema import ResponseRequest
from mlxpaged.api.openai.terms import Terms
from mlxpaged.api.streaming import event
from mlxpaged.engine import EngineInfo, TokenLogprobs
from mlxpaged.scheduler import FinishReason


class ResponseReply:
    """keep: called with the complete response and its text."""

    def __init__(
        self, info: EngineInfo, body: ResponseRequest, terms: Terms, keep: Callable[[dict[str, Any], str], None]
    ) -> None:
        self._info = info
        self._body = body
        self._terms = terms
        self._keep = keep
        self._created = int(time.time())
        self._item_id = f"msg_{terms.request_id}"
        self._sequence_number = 0

    async def complete(self, generation: Generation) -> dict[str, Any]:
        [choice] = await generation.collect()
        return self._finished(generation, choice)

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        """OpenAI's order: each thing is announced, added to, and done, from the outside in and out again."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        choice = Choice()
        try:
            yield self._event("created", response=self._response("in_progress"))
            yield self._event("in_progress", response=self._response("in_progress"))
            yield self._event("output_item.added", output_index=0, item=self._item("in_progress", []))
            yield self._event("content_part.added", **place, part=self._part("", ()))
            async for _, output in generation.outputs():
                choice.add(output)
                if output.text or output.logprobs:
                    logprobs = self._logprobs(output.logprobs)
                    yield self._event("output_text.delta", **place, delta=output.text, logprobs=logprobs)
            response = self._finished(generation, choice)
            item = response["output"][0]
            logprobs = self._logprobs(choice.logprobs)
            yield self._event("output_text.done", **place, text=choice.text, logprobs=logprobs)
            yield self._event("content_part.done", **place, part=item["content"][0])
            yield self._event("output_item.done", output_index=0, item=item)
            yield self._event(response["status"], response=response)
        except Exception as error:
            failure = from_engine(error)
            details = {"code": failure.code or failure.kind, "message": failure.message}
            yield self._event("failed", response=self._response("failed", error=details))

    def _finished(self, generation: Generation, choice: Choice) -> dict[str, Any]:
        complete = choice.finish_reason == FinishReason.STOP.value
        status = "completed" if complete else "incomplete"
        usage = generation.usage()
        response = self._response(
            status,
            output=[self._item(status, [self._part(choice.text, choice.logprobs)])],
            incomplete_details=None if complete else {"reason": "max_output_tokens"},
            completed_at=int(time.time()) if complete else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            **timeline_field([choice.timeline]),
        )
        self._keep(response, choice.text)
        return response

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        body = self._body
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
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tools": [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
        }
        return response | fields

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, text: str, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(self._info.tokenizer, tokens)["content"]
        return content if self._body.wants_logprobs else []

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": f"response.{kind}", "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: response.{kind}\n{event(data)}"
