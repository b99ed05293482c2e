"""Handles POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from mlxpaged.api.generation.answers import Answer, Answers, reply
from mlxpaged.api.generation.deltas import Text, Update
from mlxpaged.api.generation.request import MAX_LOGPROBS, GenerationRequest, sampling_params
from mlxpaged.api.generation.submission import start
from mlxpaged.api.openai.renderer import ChunkBeginning, CompletionsRenderer, TextOffsets, completion_logprobs
from mlxpaged.api.openai.schema import CompletionRequest
from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs


async def respond(request: Request, body: CompletionRequest) -> Response:
    answers = await start(request, lambda: translate(body), "cmpl")
    beginning: ChunkBeginning | None = getattr(request.state, "beginning", None)
    return await reply(answers, CompletionRenderer(answers, body, beginning), bool(body.stream))


def translate(body: CompletionRequest) -> GenerationRequest:
    """Raises ApiError."""
    tops = [body.prompt_logprobs, body.logprobs if body.echo else None]
    prompt_logprobs = max((top for top in tops if top is not None), default=None)
    return GenerationRequest.of(
        body,
        params=sampling_params(body, constraint=body.constraint(), prompt_logprobs=prompt_logprobs),
        candidates=body.num_candidates,
        most_logprobs=None if body.stream else MAX_LOGPROBS,
        client_names={
            "candidates": body.multiplier or "prompt",
            "prompt_logprobs": "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        },
    )


class CompletionBeginning(ChunkBeginning):
    kind = "text_completion"
    nothing: ClassVar[Mapping[str, Any]] = {"text": ""}


class CompletionRenderer(CompletionsRenderer):
    def __init__(self, answers: Answers, body: CompletionRequest, beginning: ChunkBeginning | None) -> None:
        super().__init__(answers, body, "text_completion", CompletionBeginning.kind, beginning)
        self._shows_logprobs = body.logprobs is not None
        self._num_top = body.logprobs or 0
        self._echoes = bool(body.echo)
        self._offsets = [self._offsets_of(index) for index in range(answers.num_choices if body.stream else 0)]

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text = "".join(part.text for part in answer.parts)
        logprobs = self._logprobs(answer.logprobs, answer.prompt_logprobs, self._offsets_of(index))
        return self._choice(index, text, answer.finish.reason, logprobs) | self.prompt_logprobs_field(answer)

    def events(self, update: Update) -> Iterator[str]:
        if update.deltas or update.logprobs or update.finish:
            reason = None if update.finish is None else update.finish.reason
            text = "".join(delta.text for delta in update.deltas if isinstance(delta, Text))
            logprobs = self._logprobs(update.logprobs, update.prompt_logprobs, self._offsets[update.choice])
            yield self.chunk(self._choice(update.choice, text, reason, logprobs))

    def empty_chunk(self, index: int) -> str:
        return self.chunk(self._choice(index, "", None, None))

    def _offsets_of(self, index: int) -> TextOffsets:
        prompt, echo = self.answers.prompt_of(index)
        return TextOffsets(self.answers.info.tokenizer, prompt, echo)

    def _logprobs(
        self, tokens: Sequence[TokenLogprobs], prompt: PromptLogprobs | None, offsets: TextOffsets
    ) -> dict[str, Any] | None:
        if not self._shows_logprobs:
            return None
        tokenizer, echoed = self.answers.info.tokenizer, prompt if self._echoes else None
        return completion_logprobs(tokenizer, tokens, offsets, echoed, self._num_top)

    def _choice(
        self, index: int, text: str, finish_reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
