"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.body import read_json
from mlxpaged.api.errors import from_engine
from mlxpaged.api.openai.generation import Generation, begin, check_text_length, check_token_ids, timeline_field
from mlxpaged.api.openai.logprobs import completion_logprobs
from mlxpaged.api.openai.schema import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from mlxpaged.api.openai.terms import Terms, terms_of
from mlxpaged.api.server import server_of
from mlxpaged.api.streaming import EventStream, answer, event
from mlxpaged.engine import EngineInfo, TokenLogprobs


async def create(request: Request) -> Response:
    body = await read_json(request, CompletionRequest)
    return await answer(request, respond(request, body))


async def respond(request: Request, body: CompletionRequest) -> Response:
    server = server_of(request)
    engine, info = server.ready(body.model)
    terms = terms_of(request, body, engine.config, "cmpl")
    params = await server.prepare(request, body.params)

    def encode() -> list[list[int]]:
        prompts = [info.tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompts()]
        check_token_ids(info, params, "prompt", prompts)
        return prompts

    def echoes() -> list[str]:
        return [p if isinstance(p, str) else info.tokenizer.decode(p) for p in body.prompts()]

    check_text_length(info, "prompt", max((len(p) for p in body.prompts() if isinstance(p, str)), default=0))
    reply = CompletionReply(info, body, terms)
    with begin(server, engine, terms, body, num_prompts=len(body.prompts())) as generation:
        prompts = await server.tokenize(encode)
        await server.compile(info, params.constraint)
        if body.echo:
            reply.echoes = await server.tokenize(echoes)
        generation.submit("prompt", prompts, params, DEFAULT_COMPLETION_TOKENS)
    if body.stream:
        return EventStream(reply.events(generation), generation.close)
    return JSONResponse(await reply.complete(generation))


class CompletionReply:
    """The answers to one or more prompts in the format of the completions API, whole or in chunks.

    echoes: the prompts' texts, which begin their answers; empty where they do not.
    """

    def __init__(self, info: EngineInfo, body: CompletionRequest, terms: Terms) -> None:
        self.echoes: Sequence[str] = ()
        self._info = info
        self._body = body
        self._terms = terms
        self._created = int(time.time())

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._terms.request_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._info.model,
            "service_tier": self._terms.service_tier,
        }

    async def complete(self, generation: Generation) -> dict[str, Any]:
        choices = await generation.collect()
        return self._envelope() | {
            "choices": [
                self._choice(i, self._echo(i) + choice.text, choice.finish_reason, choice.logprobs)
                for i, choice in enumerate(choices)
            ],
            "usage": generation.usage(),
            **timeline_field([choice.timeline for choice in choices]),
        }

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        offsets = [0] * len(generation.streams)
        usage = {"usage": None} if self._body.include_usage else {}
        try:
            for index in range(len(generation.streams) if self.echoes else 0):
                yield event(self._envelope() | {"choices": [self._choice(index, self._echo(index), None, [])]} | usage)
            async for index, output in generation.outputs():
                reason = output.finish_reason.value if output.finish_reason else None
                if output.text or output.logprobs or reason:
                    choice = self._choice(index, output.text, reason, list(output.logprobs), offsets[index])
                    yield event(self._envelope() | {"choices": [choice]} | usage)
                    offsets[index] += sum(len(self._info.tokenizer.token_text(t.token_id)) for t in output.logprobs)
            last = generation.last_chunk(self._body.include_usage)
            if last is not None:
                yield event(self._envelope() | last)
            yield "data: [DONE]\n\n"
        except Exception as error:
            yield event(from_engine(error).body())

    def _echo(self, index: int) -> str:
        return self.echoes[index // self._body.num_choices] if self.echoes else ""

    def _choice(
        self, index: int, text: str, finish_reason: str | None, tokens: list[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any]:
        asked = self._body.logprobs is not None
        logprobs = completion_logprobs(self._info.tokenizer, tokens, offset) if asked else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
