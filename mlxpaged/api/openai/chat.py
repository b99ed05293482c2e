"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.answer_parser import AnswerParser
from mlxpaged.api.body import read_json
from mlxpaged.api.conversation import Conversation, start
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Choice, timeline_field
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.parts import CallArguments, CallBroken, CallStart, Message, Part, Text, Thinking
from mlxpaged.api.streaming import EventStream, answer, event


async def create(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    return await answer(request, respond(request, body))


async def respond(request: Request, body: ChatRequest) -> Response:
    conversation = await start(request, lambda: body, "chatcmpl")
    reply = ChatReply(conversation, body)
    if body.stream:
        return EventStream(reply.events(), conversation.generation.close)
    return JSONResponse(await reply.complete())


class ChatReply:
    """The answers in the format of the chat API, whole or in chunks."""

    def __init__(self, conversation: Conversation, body: ChatRequest) -> None:
        self._info = conversation.info
        self._terms = conversation.terms
        self._generation = conversation.generation
        self._new_parser = conversation.new_parser
        self._body = body
        self._created = int(time.time())

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._terms.request_id,
            "object": kind,
            "created": self._created,
            "model": self._info.model,
            "service_tier": self._terms.service_tier,
        }

    async def complete(self) -> dict[str, Any]:
        choices = await self._generation.collect()
        return self._envelope("chat.completion") | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._generation.usage(),
            **timeline_field([choice.timeline for choice in choices]),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        parser = self._new_parser()
        answer = Message.of(parser.feed(choice.text) + parser.finish())
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls.values()
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(choice.finish_reason, parser),
        }

    async def events(self) -> AsyncGenerator[str, None]:
        try:
            parsers = [self._new_parser() for _ in range(self._body.num_choices)]
            for index in range(self._body.num_choices):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for index, output in self._generation.outputs():
                parts = parsers[index].feed(output.text)
                if output.finish_reason is not None:
                    parts += parsers[index].finish()
                deltas = [delta for part in parts if (delta := delta_of(part))]
                logprobs = self._logprobs(list(output.logprobs))
                if output.logprobs and not deltas:
                    deltas = [{"content": ""}]
                for delta in deltas:
                    yield self._chunk(index, delta, logprobs=logprobs)
                    logprobs = None
                if output.finish_reason is not None:
                    reason = self._finish_reason(output.finish_reason.value, parsers[index])
                    yield self._chunk(index, {}, finish_reason=reason)
            last = self._generation.last_chunk(self._body.include_usage)
            if last is not None:
                yield event(self._envelope("chat.completion.chunk") | last)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(from_engine(error).body())

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._body.include_usage else {}
        return event(self._envelope("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _finish_reason(self, reason: str | None, parser: AnswerParser) -> str | None:
        """A call that the request itself named is an answer like any other, to OpenAI: it ends with "stop"."""
        calls = parser.calls_made and not self._body.names_tool
        return "tool_calls" if reason == "stop" and calls else reason

    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._info.tokenizer, tokens) if self._body.logprobs else None


def delta_of(part: Part) -> dict[str, Any]:
    """What a part adds to a message; {} for nothing."""
    match part:
        case Text(text) | CallBroken(_, text):
            return {"content": text}
        case Thinking(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {}
