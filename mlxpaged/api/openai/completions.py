"""Handles POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.generation.answers import Answer, Answers, reply
from mlxpaged.api.generation.deltas import Text, Update
from mlxpaged.api.generation.request import GenerationRequest, sampling_params
from mlxpaged.api.generation.submission import start
from mlxpaged.api.openai.renderer import CompletionsRenderer, completion_logprobs
from mlxpaged.api.openai.schema import CompletionRequest
from mlxpaged.engine import TokenLogprobs


async def respond(request: Request, body: CompletionRequest) -> Response:
    answers = await start(request, lambda: translate(body), "cmpl")
    return await reply(answers, CompletionRenderer(answers, body), bool(body.stream))


def translate(body: CompletionRequest) -> GenerationRequest:
    """Raises ApiError."""
    return GenerationRequest.of(
        body,
        params=sampling_params(body, constraint=body.constraint()),
        candidates=body.num_candidates,
        client_names={"candidates": body.multiplier or "prompt"},
    )


class CompletionRenderer(CompletionsRenderer):
    def __init__(self, answers: Answers, body: CompletionRequest) -> None:
        super().__init__(answers, body, "text_completion", "text_completion")
        self._shows_logprobs = body.logprobs is not None
        self._offsets = [0] * answers.num_choices

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text = "".join(part.text for part in answer.parts)
        return self._choice(index, text, answer.finish.reason, answer.logprobs)

    def events(self, update: Update) -> Iterator[str]:
        if update.deltas or update.logprobs or update.finish:
            reason = None if update.finish is None else update.finish.reason
            text = "".join(delta.text for delta in update.deltas if isinstance(delta, Text))
            offset = self._offsets[update.choice]
            yield self.chunk(self._choice(update.choice, text, reason, update.logprobs, offset))
            tokenizer = self.answers.info.tokenizer
            self._offsets[update.choice] += sum(len(tokenizer.token_text(token.token_id)) for token in update.logprobs)

    def _choice(
        self, index: int, text: str, finish_reason: str | None, tokens: Sequence[TokenLogprobs], offset: int = 0
    ) -> dict[str, Any]:
        tokenizer = self.answers.info.tokenizer
        logprobs = completion_logprobs(tokenizer, tokens, offset) if self._shows_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
