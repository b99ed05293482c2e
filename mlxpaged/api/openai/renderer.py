"""Renders what chat completions and completions share: envelope, usage, log-probabilities, end and errors."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.answers import Answer, Answers, Renderer, progress_field, timeline_field
from mlxpaged.api.generation.deltas import Usage
from mlxpaged.api.openai.schema import SamplingFields
from mlxpaged.api.streaming import event
from mlxpaged.engine import PromptProgress, TokenLogprobs
from mlxpaged.models import Tokenizer


class CompletionsRenderer(Renderer):
    """kind, chunk_kind: the "object" of a whole answer, and of a chunk."""

    def __init__(self, answers: Answers, body: SamplingFields, kind: str, chunk_kind: str) -> None:
        self.answers = answers
        self._kind = kind
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_so_far = options is not None and bool(options.continuous_usage_stats)
        self._envelope = {
            "id": answers.context.request_id,
            "object": chunk_kind,
            "created": int(time.time()),
            "model": answers.info.model,
            "service_tier": answers.context.service_tier,
        }

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._envelope | {
            "object": self._kind,
            "choices": [self.choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_field(self.answers.usage),
            **timeline_field([answer.finish.timeline for answer in answers]),
        }

    def chunk(self, choice: dict[str, Any]) -> str:
        usage = (
            {"usage": usage_field(self.answers.usage) if self._usage_so_far else None} if self._include_usage else {}
        )
        return event(self._envelope | {"choices": [choice]} | usage)

    def end(self) -> Iterator[str]:
        last = {"usage": usage_field(self.answers.usage)} if self._include_usage else {}
        last |= timeline_field(self.answers.timelines)
        if last:
            yield event(self._envelope | {"choices": []} | last)
        yield "data: [DONE]\n\n"

    def progress(self, progress: PromptProgress) -> str:
        return event(self._envelope | {"choices": []} | progress_field(progress))

    def error(self, error: ApiError) -> str:
        return event(error.body())


def usage_field(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


MIN_LOGPROB = -9999.0
"""This stands for minus infinity, which JSON does not have. OpenAI uses the same value."""


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": tokenizer.token_bytes(token_id),
        }

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*candidate) for candidate in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int = 0) -> dict[str, Any]:
    """offset: characters of the answer before the first of `tokens`."""
    texts = [tokenizer.token_text(token.token_id) for token in tokens]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprob, MIN_LOGPROB) for token in tokens],
        # OpenAI adds the sampled token if it is not among the most likely ones.
        "top_logprobs": [
            {
                tokenizer.token_text(candidate): max(logprob, MIN_LOGPROB)
                for candidate, logprob in (*token.top, (token.token_id, token.logprob))
            }
            for token in tokens
        ],
        "text_offset": offsets,
    }
