"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.body import read_json
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Generation, check_text_length, check_token_ids, collect, new_id, submit_all
from mlxpaged.api.openai.logprobs import chat_logprobs
from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.api.streaming import EventStream, answer, event
from mlxpaged.engine import EngineInfo


async def create(request: Request) -> Response:
    body = await read_json(request, ChatRequest)
    return await answer(request, respond(server_of(request), body))


async def respond(server: Server, body: ChatRequest) -> Response:
    engine, info = server.ready(body.model)
    params = body.params()
    messages = [message.for_template() for message in body.messages]
    check_text_length(info, "messages", sum(len(message["content"]) for message in messages))
    reply = ChatReply(new_id("chatcmpl"), info, body)
    with engine.reserve(1) as arrival_time:
        prompt = await server.tokenize(lambda: info.tokenizer.apply_chat_template(messages))
        check_token_ids(info, params, "messages", [prompt])
        generation = submit_all(engine, reply.id, "messages", [prompt], params, arrival_time)
    if body.stream:
        return EventStream(reply.events(generation), generation.close)
    return JSONResponse(await reply.complete(generation))


class ChatReply:
    """One answer in the format of the chat API, whole or in chunks."""

    def __init__(self, reply_id: str, info: EngineInfo, body: ChatRequest) -> None:
        self.id = reply_id
        self._info = info
        self._body = body
        self._created = int(time.time())

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._info.model}

    async def complete(self, generation: Generation) -> dict[str, Any]:
        [choice] = await collect(generation)
        return self._envelope("chat.completion") | {
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
            ],
            "usage": generation.usage(),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            async for _, output in generation.outputs():
                if output.text or output.logprobs:
                    yield self._chunk({"content": output.text}, logprobs=self._logprobs(list(output.logprobs)))
                if output.finish_reason is not None:
                    yield self._chunk({}, finish_reason=output.finish_reason.value)
            if self._body.include_usage:
                usage = {"choices": [], "usage": generation.usage()}
                yield event(self._envelope("chat.completion.chunk") | usage)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(from_engine(error).body())

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._body.include_usage else {}
        return event(self._envelope("chat.completion.chunk") | {"choices": [choice]} | usage)

    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        return chat_logprobs(self._info.tokenizer, tokens) if self._body.logprobs else None
