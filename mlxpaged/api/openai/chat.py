"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.body import read_json
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Generation, begin, check_text_length, check_token_ids, timeline_field
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.openai.terms import Terms, terms_of
from mlxpaged.api.server import server_of
from mlxpaged.api.streaming import EventStream, answer, event
from mlxpaged.engine import EngineInfo


async def create(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    return await answer(request, respond(request, body))


async def respond(request: Request, body: ChatRequest) -> Response:
    server = server_of(request)
    engine, info = server.ready(body.model)
    terms = terms_of(request, body, engine.config, "chatcmpl")
    params = body.params()
    messages = [message.for_template() for message in body.messages]
    check_text_length(info, "messages", sum(len(message["content"]) for message in messages))
    reply = ChatReply(info, body, terms)
    with begin(server, engine, terms, body, num_prompts=1) as generation:
        prompt = await server.tokenize(lambda: info.tokenizer.apply_chat_template(messages))
        check_token_ids(info, params, "messages", [prompt])
        await server.compile(info, params.constraint)
        generation.submit("messages", [prompt], params)
    if body.stream:
        return EventStream(reply.events(generation), generation.close)
    return JSONResponse(await reply.complete(generation))


class ChatReply:
    """The answers in the format of the chat API, whole or in chunks."""

    def __init__(self, info: EngineInfo, body: ChatRequest, terms: Terms) -> None:
        self._info = info
        self._body = body
        self._terms = terms
        self._created = int(time.time())

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._terms.request_id,
            "object": kind,
            "created": self._created,
            "model": self._info.model,
            "service_tier": self._terms.service_tier,
        }

    async def complete(self, generation: Generation) -> dict[str, Any]:
        choices = await generation.collect()
        return self._envelope("chat.completion") | {
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": generation.usage(),
            **timeline_field([choice.timeline for choice in choices]),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        try:
            for index in range(self._body.num_choices):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for index, output in generation.outputs():
                if output.text or output.logprobs:
                    yield self._chunk(index, {"content": output.text}, logprobs=self._logprobs(list(output.logprobs)))
                if output.finish_reason is not None:
                    yield self._chunk(index, {}, finish_reason=output.finish_reason.value)
            last = generation.last_chunk(self._body.include_usage)
            if last is not None:
                yield event(self._envelope("chat.completion.chunk") | last)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(from_engine(error).body())

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._body.include_usage else {}
        return event(self._envelope("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._info.tokenizer, tokens) if self._body.logprobs else None
