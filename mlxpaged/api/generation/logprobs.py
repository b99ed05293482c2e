"""Describes the log-probabilities of tokens as OpenAI's chat API and Ollama's do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxpaged.api.answer_thread import give_way
from mlxpaged.core.engine.logprobs import TokenLogprobs
from mlxpaged.models.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""This stands for minus infinity, which JSON does not have. OpenAI uses the same value."""


def described(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> Iterator[dict[str, Any]]:
    """Yields an object for each token. All objects of a long answer together would take seven times the memory of their
    JSON."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": tokenizer.token_bytes(token_id),
        }

    for token in tokens:
        give_way()
        yield entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*candidate) for candidate in token.top]}
