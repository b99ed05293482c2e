"""What a step costs, learned from the steps that ran, and how much of a prompt fits beside those who decode.

The time of a step is taken as a sum of five parts with one coefficient each: the step itself, its decoding rows, the
keys these attend to, its prompt tokens, and the keys that those attend to. The coefficients are the least squares of
the relative errors over the latest steps, none of them negative. So a chunk becomes shorter as its context grows, on a
machine that computes 500 tokens a second as on one that computes 5,000, and nothing has to be set for either.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

KEPT = 64
"""Steps that are remembered, with prompts and without: these are kept apart, or a long answer would crowd out all that
is known of prompts."""

OUTLIER = 4.0
"""A step that took this many times what was expected counts as that: something else held it up (a kernel was compiled,
another process ran)."""

SCALE = np.array([1.0, 10.0, 1e4, 100.0, 1e5])
"""Usual sizes of the five parts. Where the steps do not tell which part takes the time, it is shared in this way."""

EXTRAPOLATION = 4
"""A chunk may be this many times as long as the prompts of any step that is remembered. What a few tokens cost is lost
in the noise of a step: from one step with eight of them, a chunk of 1,000 was taken for free in every tenth trial."""

SHORTEST = 1e-6
"""Seconds: a clock may not tell two steps apart."""

PROMPT_TOKENS = 3
"""Where they stand among the five parts."""

Observations = deque[tuple[tuple[float, ...], float]]
"""The parts of steps, and their seconds."""


def chunk_keys(start: int, tokens: int) -> float:
    """Keys that the tokens from `start` on attend to, all together."""
    return tokens * (start + (tokens + 1) / 2)


def non_negative_least_squares(
    parts: npt.NDArray[np.float64], goal: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Columns are left out, the most negative first, until no coefficient is negative: not always the very best set of
    columns, which would not be worth its search here."""
    kept = np.flatnonzero(np.abs(parts).max(axis=0) > 0)
    solution = np.zeros(parts.shape[1])
    while kept.size:
        found = np.linalg.lstsq(parts[:, kept], goal, rcond=1e-6)[0]
        if found.min() >= 0:
            solution[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return solution


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a step, none negative. Keys are counted once for every token that attends to them.
    longest_chunk: tokens, of those that the others were learned to hold for."""

    per_step: float
    per_decode: float
    per_decode_key: float
    per_prompt_token: float
    per_prompt_key: float
    longest_chunk: int = sys.maxsize

    def decode_seconds(self, contexts: ListOf[int]) -> float:
        """Of a step of decoding sequences alone, with these lengths."""
        return self.per_step + self.per_decode * len(contexts) + self.per_decode_key * sum(contexts)

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """What a chunk of a prompt adds to a step."""
        return self.per_prompt_token * tokens + self.per_prompt_key * chunk_keys(start, tokens)

    def chunk_within(self, seconds: float, start: int) -> int:
        """The most tokens from `start` on that take no longer, as far as is known: the larger root of a quadratic
        equation, in the form that also holds where one of its terms is zero."""
        linear, square = self.per_prompt_token + self.per_prompt_key * (start + 0.5), self.per_prompt_key / 2
        divisor = linear + math.sqrt(linear * linear + 4 * square * max(0.0, seconds))
        return int(min(2 * max(0.0, seconds) / divisor if divisor else math.inf, self.longest_chunk))


class StepCost:
    """Learns from every step that ended; tells what one that is being made up would take."""

    def __init__(self) -> None:
        self._plain: Observations = deque(maxlen=KEPT)
        self._with_prompts: Observations = deque(maxlen=KEPT)
        self._costs: Costs | None = None

    def observe(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]], seconds: float) -> None:
        """A step of decoding sequences with these lengths, and of chunks of prompts: their starts and their tokens."""
        if self._costs is not None:
            expected = self._costs.decode_seconds(contexts)
            expected += sum(self._costs.chunk_seconds(start, tokens) for start, tokens in chunks)
            seconds = min(seconds, OUTLIER * expected)
        parts = (
            1,
            len(contexts),
            sum(contexts),
            sum(tokens for _, tokens in chunks),
            sum(chunk_keys(start, tokens) for start, tokens in chunks),
        )
        (self._with_prompts if chunks else self._plain).append((parts, max(seconds, SHORTEST)))

    def costs(self) -> Costs | None:
        """As the steps so far tell. None before any step with a prompt ran."""
        if not self._with_prompts:
            return None
        parts, seconds = zip(*self._plain, *self._with_prompts, strict=True)
        relative = np.asarray(parts) / SCALE / np.asarray(seconds)[:, None]
        coefficients = (non_negative_least_squares(relative, np.ones(len(seconds))) / SCALE).tolist()
        longest = max(parts[PROMPT_TOKENS] for parts, _ in self._with_prompts)
        self._costs = replace(Costs(*coefficients), longest_chunk=EXTRAPOLATION * int(longest))
        return self._costs
