"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.body import read_json
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Generation, check_text_length, check_token_ids, collect, new_id, submit_all
from mlxpaged.api.openai.logprobs import completion_logprobs
from mlxpaged.api.openai.schema import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from mlxpaged.api.server import Server, server_of
from mlxpaged.api.streaming import EventStream, answer, event
from mlxpaged.engine import EngineInfo, TokenLogprobs


async def create(request: Request) -> Response:
    body = await read_json(request, CompletionRequest)
    return await answer(request, respond(server_of(request), body))


async def respond(server: Server, body: CompletionRequest) -> Response:
    engine, info = server.ready(body.model)
    params = body.params()

    def encode() -> list[list[int]]:
        return [info.tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompts()]

    check_text_length(info, "prompt", max((len(p) for p in body.prompts() if isinstance(p, str)), default=0))
    reply = CompletionReply(new_id("cmpl"), info, body)
    with engine.reserve(len(body.prompts())) as arrival_time:
        prompts = await server.tokenize(encode)
        check_token_ids(info, params, "prompt", prompts)
        generation = submit_all(engine, reply.id, "prompt", prompts, params, arrival_time, DEFAULT_COMPLETION_TOKENS)
    if body.stream:
        return EventStream(reply.events(generation), generation.close)
    return JSONResponse(await reply.complete(generation))


class CompletionReply:
    """The answers to one or more prompts in the format of the completions API, whole or in chunks."""

    def __init__(self, reply_id: str, info: EngineInfo, body: CompletionRequest) -> None:
        self.id = reply_id
        self._info = info
        self._body = body
        self._created = int(time.time())

    def _envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._info.model}

    async def complete(self, generation: Generation) -> dict[str, Any]:
        choices = await collect(generation)
        return self._envelope() | {
            "choices": [
                self._choice(i, choice.text, choice.finish_reason, choice.logprobs) for i, choice in enumerate(choices)
            ],
            "usage": generation.usage(),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        offsets = [0] * len(generation.streams)
        usage = {"usage": None} if self._body.include_usage else {}
        try:
            async for index, output in generation.outputs():
                reason = output.finish_reason.value if output.finish_reason else None
                if output.text or output.logprobs or reason:
                    choice = self._choice(index, output.text, reason, list(output.logprobs), offsets[index])
                    yield event(self._envelope() | {"choices": [choice]} | usage)
                    offsets[index] += sum(len(self._info.tokenizer.token_text(t.token_id)) for t in output.logprobs)
            if self._body.include_usage:
                yield event(self._envelope() | {"choices": [], "usage": generation.usage()})
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(from_engine(error).body())

    def _choice(
        self, index: int, text: str, finish_reason: str | None, tokens: list[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any]:
        asked = self._body.logprobs is not None
        logprobs = completion_logprobs(self._info.tokenizer, tokens, offset) if asked else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
