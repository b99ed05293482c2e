"""What mlx-lm itself generates, for tests that compare the engine with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tests.models.architectures import VOCAB_SIZE

TIE = 1e-4
"""If mlx-lm's two best logits are closer, float32 rounding alone may choose either, and the answers go apart."""


@dataclass(frozen=True)
class Answer:
    """margins: distance of the two best logits, for each token."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def equals(self, tokens: list[int]) -> bool:
        """Token for token, up to a tie."""
        return len(tokens) == len(self.tokens) and self.first_difference(tokens) is None

    def first_difference(self, tokens: list[int]) -> int | None:
        """Index of the first other token, if it is no tie."""
        pairs = enumerate(zip(tokens, self.tokens, strict=False))
        at = next((i for i, (token, right) in pairs if token != right), None)
        return at if at is not None and self.margins[at] >= TIE else None


def greedy_answer(
    model: Any, cache: list[Any], prompt: list[int], num_tokens: int, banned: tuple[int, ...] = ()
) -> Answer:
    """Go on from mlx-lm's caches. banned: tokens that are never chosen."""
    answer, tokens = Answer(), mx.array([prompt])
    bias = mx.zeros(VOCAB_SIZE)
    if banned:
        bias[mx.array(banned)] = -mx.inf
    for _ in range(num_tokens):
        logits = model(tokens, cache=cache)[0, -1, :VOCAB_SIZE].astype(mx.float32) + bias
        second, best = (float(logit) for logit in mx.sort(logits)[-2:])
        answer.tokens.append(int(mx.argmax(logits)))
        answer.margins.append(best - second)
        tokens = mx.array([answer.tokens[-1:]])
    return answer
