"""Log-probabilities in the formats of chat completions and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxpaged.engine import TokenLogprobs
from mlxpaged.models import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the value OpenAI uses."""


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
