"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.answer_parser import AnswerParser
from mlxpaged.api.anthropic.errors import error_body
from mlxpaged.api.anthropic.events import BlockEvents, named_event, seal, signature
from mlxpaged.api.anthropic.schema import CountTokensRequest, MessagesRequest
from mlxpaged.api.anthropic.translation import chat_request, own_words
from mlxpaged.api.body import read_json
from mlxpaged.api.conversation import Conversation, render, start
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import timeline_field
from mlxpaged.api.parts import CallArguments, CallBroken, CallStart, Part, Text, Thinking
from mlxpaged.api.server import server_of
from mlxpaged.api.streaming import EventStream, answer


async def create(request: Request) -> Response:
    body = await read_json(request, MessagesRequest)
    return await answer(request, respond(request, body))


async def respond(request: Request, body: MessagesRequest) -> Response:
    _, info = server_of(request).ready(body.model)
    with own_words(body):
        conversation = await start(request, lambda: chat_request(body, info.tokenizer), "msg")
    reply = MessageReply(conversation, body.omits_thinking)
    if body.stream:
        return EventStream(reply.events(), conversation.generation.close)
    return JSONResponse(await reply.complete())


async def count_tokens(request: Request) -> Response:
    body = await read_json(request, CountTokensRequest)
    return await answer(request, count(request, body))


async def count(request: Request, body: CountTokensRequest) -> Response:
    server = server_of(request)
    _, info = server.ready(body.model)
    with own_words(body):
        asked = await server.prepare(request, lambda: chat_request(body, info.tokenizer))
        prompt = await render(request, info, asked)
    return JSONResponse({"input_tokens": len(prompt)})


class MessageReply:
    """The answer in the format of the Messages API, whole or in events."""

    def __init__(self, conversation: Conversation, omit_thinking: bool) -> None:
        self._model = conversation.info.model
        self._id = conversation.terms.request_id
        self._generation = conversation.generation
        self._parser = conversation.new_parser()
        self._omit_thinking = omit_thinking

    def _message(self, content: list[dict[str, Any]], reason: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **reason,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """As far as the answer has come; a prompt's tokens count either as read from the cache, or as input."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    async def complete(self) -> dict[str, Any]:
        (choice,) = await self._generation.collect()
        blocks = content_blocks(self._parser.feed(choice.text) + self._parser.finish(), self._omit_thinking)
        reason = stop_reason(choice.finish_reason, choice.stop_string, self._parser)
        return self._message(blocks, reason) | timeline_field([choice.timeline])

    async def events(self) -> AsyncGenerator[str, None]:
        blocks = BlockEvents(self._omit_thinking)
        started = False
        try:
            async for _, output in self._generation.outputs():
                if not started:  # not before now: only the first output knows how much of the prompt was cached
                    started = True
                    message = self._message([], {"stop_reason": None, "stop_sequence": None})
                    yield named_event({"type": "message_start", "message": message})
                parts = self._parser.feed(output.text)
                if output.finish_reason is not None:
                    parts += self._parser.finish()
                for part in parts:
                    for event in blocks.add(part):
                        yield named_event(event)
                if output.finish_reason is not None:
                    for event in blocks.close():
                        yield named_event(event)
                    delta = stop_reason(output.finish_reason.value, output.stop_string, self._parser)
                    last = {"type": "message_delta", "delta": delta, "usage": self._usage()}
                    yield named_event(last | timeline_field([output.timeline]))
            yield named_event({"type": "message_stop"})
        except Exception as error:
            yield named_event(error_body(from_engine(error), self._id))


def stop_reason(reason: str | None, stop_string: str | None, parser: AnswerParser) -> dict[str, Any]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    ended = "tool_use" if parser.calls_made else "end_turn"
    return {"stop_reason": "max_tokens" if reason == "length" else ended, "stop_sequence": None}


def content_blocks(parts: Sequence[Part], omit_thinking: bool) -> list[dict[str, Any]]:
    """The blocks of a whole message, in the order in which the model wrote them."""
    blocks: list[dict[str, Any]] = []
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            calls[part.index] = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": ""}
            blocks.append(calls[part.index])
        elif isinstance(part, CallArguments):
            calls[part.index]["input"] += part.text
        elif isinstance(part, Thinking):
            extend(blocks, "thinking", part.text)
        elif isinstance(part, (Text, CallBroken)):
            if isinstance(part, CallBroken):
                blocks.remove(calls.pop(part.index))
            extend(blocks, "text", part.text)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"], parse_float=finite)
        elif block["type"] == "thinking":
            block["signature"] = (seal if omit_thinking else signature)(block["thinking"])
            if omit_thinking:
                block["thinking"] = ""
    return blocks


def finite(number: str) -> float:
    """One that JSON can hold again: it has no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))


def extend(blocks: list[dict[str, Any]], kind: str, text: str) -> None:
    """The last block, or a new one where that is of another kind."""
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append({"type": kind, kind: ""})
    blocks[-1][kind] += text
