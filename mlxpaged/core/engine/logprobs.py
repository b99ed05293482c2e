"""Log-probabilities as records: of a sampled token, and of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 1024
"""Tokens of a prompt that are turned into records at once."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's logits before bias, penalties and temperature.

    top: the most likely tokens, best first; or the tokens that the request asked for, in its order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt from position `first` on. No logits predict the one at 0.

    token_ids: the whole prompt. For the n tokens from `first` on: logprobs[n], ranks[n], which is 1 for the most likely
    token, and the k most likely tokens, best first: top_ids[n, k], top_logprobs[n, k].
    """

    token_ids: Sequence[int]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    first: int = 1

    @classmethod
    def unknown(cls, token_ids: Sequence[int], top: int, first: int = 1) -> PromptLogprobs:
        """Arrays for a prompt of which nothing is computed yet. `put` fills them."""
        n = max(0, len(token_ids) - first)
        return cls(
            token_ids,
            first=first,
            logprobs=np.zeros(n, np.float32),
            ranks=np.zeros(n, np.int32),
            top_ids=np.zeros((n, top), np.int32),
            top_logprobs=np.zeros((n, top), np.float32),
        )

    def put(self, positions: range, rows: PromptRows) -> None:
        """rows: for the tokens at these positions. They may have more columns than were asked for here."""
        at, top = slice(positions.start - self.first, positions.stop - self.first), self.top_ids.shape[1]
        self.logprobs[at], self.ranks[at] = rows.logprobs, rows.ranks
        self.top_ids[at], self.top_logprobs[at] = rows.top_ids[:, :top], rows.top_logprobs[:, :top]

    def tokens(self, top: int) -> Iterator[TokenLogprobs]:
        """Yields those of the tokens from `first` on, with the `top` most likely tokens each. All together would take
        ten times the memory of the arrays."""
        token_ids = iter(self.token_ids[self.first :])
        for start in range(0, len(self.logprobs), PIECE):
            rows = slice(start, start + PIECE)
            tables: list[list[Any]] = [self.top_ids[rows, :top].tolist(), self.top_logprobs[rows, :top].tolist()]
            tops = (tuple(zip(ids, logprobs, strict=True)) for ids, logprobs in zip(*tables, strict=True))
            for logprob, most_likely in zip(self.logprobs[rows].tolist(), tops, strict=True):
                yield TokenLogprobs(next(token_ids), logprob, most_likely)


@dataclass(frozen=True)
class PromptRows:
    """Some rows of PromptLogprobs. is_finite: whether the logits of all rows were finite."""

    is_finite: bool
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
