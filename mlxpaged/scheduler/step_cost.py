"""Estimates what a step costs. It learns from the steps that ran.

The time of a step is a sum of five parts with one coefficient each: the step itself, its decoding rows, the keys that
these attend to, its prompt tokens, and the keys that those attend to. The coefficients are a least squares fit of the
relative errors over the latest steps, and none is negative. So chunks become shorter as their context grows, on a
machine that computes 500 tokens a second and on one that computes 5,000, without any setting.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlxpaged.scheduler.row_tiles import ANY_ROWS, RowTiles

KEPT = 64
"""Latest steps with prompts that are kept, and as many without. They are kept apart, because a long answer would push
out all steps with prompts."""

OUTLIER = 4.0
"""A step counts as at most this many times its expected time. If it took longer, something else delayed it: a kernel
was compiled, or another process ran."""

SCALE = np.array([1.0, 10.0, 1e4, 100.0, 1e5])
"""Usual sizes of the five parts. If the steps do not tell which part takes the time, the fit shares it accordingly."""

EXTRAPOLATION = 4
"""A chunk may have this many times as many tokens as the prompts of any step that is kept. The cost of a few tokens is
lost in the noise: after one step with eight tokens, a chunk of 1,000 seemed free in every tenth trial."""

MIN_PROMPT_STEPS = 8
"""Steps with prompts that must have run before the time of a whole prompt is estimated."""

SHORTEST = 1e-6
"""Shortest time of a step, in seconds: a clock may not tell two steps apart."""

PROMPT_TOKENS, PROMPT_KEYS = 3, 4
"""Indices in the five parts."""

Observations = deque[tuple[tuple[float, ...], float]]
"""The parts of each step, and its seconds."""


def chunk_keys(start: int, tokens: int) -> float:
    """Keys that the tokens from `start` on attend to, added up over these tokens."""
    return tokens * (start + (tokens + 1) / 2)


def non_negative_least_squares(
    parts: npt.NDArray[np.float64], goal: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Drop the most negative column until no coefficient is negative. That is not always the best set of columns."""
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
    """The seconds that each part of a step takes. Keys are counted once for every token that attends to them.

    longest_chunk, longest_context: tokens up to which the coefficients may be trusted.
    """

    per_step: float
    per_decode: float
    per_decode_key: float
    per_prompt_token: float
    per_prompt_key: float
    longest_chunk: int = sys.maxsize
    longest_context: int = sys.maxsize

    def decode_seconds(self, contexts: ListOf[int]) -> float:
        """Time of a step that only decodes sequences with these context lengths."""
        return self.per_step + self.per_decode * len(contexts) + self.per_decode_key * sum(contexts)

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """What a chunk of a prompt adds to a step."""
        return self.per_prompt_token * tokens + self.per_prompt_key * chunk_keys(start, tokens)

    def chunk_within(self, seconds: float, start: int) -> int:
        """The most tokens from `start` on that are expected to take at most `seconds`. It is the larger root of a
        quadratic equation, in the form that also holds if one of its terms is zero."""
        linear, square = self.per_prompt_token + self.per_prompt_key * (start + 0.5), self.per_prompt_key / 2
        divisor = linear + math.sqrt(linear * linear + 4 * square * max(0.0, seconds))
        return int(min(2 * max(0.0, seconds) / divisor if divisor else math.inf, self.longest_chunk))

    def prefill_seconds(self, start: int, tokens: int, max_chunk: int) -> float:
        """Time of the tokens from `start` on, without other work, in steps of at most `max_chunk` tokens. Tokens beyond
        longest_context are not counted, so the estimate is too low rather than too high."""
        tokens = max(0, min(tokens, self.longest_context - start))
        return self.per_step * math.ceil(tokens / max_chunk) + self.chunk_seconds(start, tokens)


class StepCost:
    """Learns from every finished step, and estimates the costs of later ones."""

    def __init__(self, tiles: RowTiles = ANY_ROWS) -> None:
        """tiles: the tokens that fill a tile cost as much as prompt tokens."""
        self._tiles = tiles
        self._plain: Observations = deque(maxlen=KEPT)
        self._with_prompts: Observations = deque(maxlen=KEPT)
        self._costs: Costs | None = None
        self._is_current = True

    def observe(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]], seconds: float) -> None:
        """A step took `seconds`. contexts: of its decoding sequences. chunks: (start, tokens) of its prompts."""
        if (expected := self.estimate(contexts, chunks)) is not None:
            seconds = min(seconds, OUTLIER * expected)
        parts = (
            1,
            len(contexts),
            sum(contexts),
            self._tiles.padded(len(contexts), sum(tokens for _, tokens in chunks)) if chunks else 0,
            sum(chunk_keys(start, tokens) for start, tokens in chunks),
        )
        (self._with_prompts if chunks else self._plain).append((parts, max(seconds, SHORTEST)))
        self._is_current = False

    def costs(self) -> Costs | None:
        """Return None before any step with a prompt ran."""
        if self._with_prompts and not self._is_current:
            parts, seconds = zip(*self._plain, *self._with_prompts, strict=True)
            relative = np.asarray(parts) / SCALE / np.asarray(seconds)[:, None]
            coefficients = (non_negative_least_squares(relative, np.ones(len(seconds))) / SCALE).tolist()
            tokens = [(parts[PROMPT_TOKENS], parts[PROMPT_KEYS]) for parts, _ in self._with_prompts]
            self._costs = replace(
                Costs(*coefficients),
                longest_chunk=EXTRAPOLATION * int(max(count for count, _ in tokens)),
                longest_context=EXTRAPOLATION * int(max(keys / count + count / 2 for count, keys in tokens)),
            )
            self._is_current = True
        return self._costs

    def estimate(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]]) -> float | None:
        """Estimates a step by the costs that `costs` has returned last. None before it has."""
        costs = self._costs
        if costs is None:
            return None
        filling = self._tiles.padded(len(contexts), tokens := sum(tokens for _, tokens in chunks)) - tokens
        seconds = costs.decode_seconds(contexts) + sum(costs.chunk_seconds(start, tokens) for start, tokens in chunks)
        return seconds + costs.per_prompt_token * filling * bool(chunks)

    def expected_seconds(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]]) -> float | None:
        """The same; None also if too few steps with prompts ran before, or if the step is so large that the costs may
        not be trusted. Any thread may call it."""
        costs = self._costs
        if costs is None or len(self._with_prompts) < MIN_PROMPT_STEPS:
            return None
        longest = max((*contexts, *(start + tokens for start, tokens in chunks)), default=0)
        if longest > costs.longest_context or any(tokens > costs.longest_chunk for _, tokens in chunks):
            return None
        return self.estimate(contexts, chunks)

    def reliable_costs(self) -> Costs | None:
        """Return None while too few steps with prompts ran to estimate the time of a whole prompt."""
        return self.costs() if len(self._with_prompts) >= MIN_PROMPT_STEPS else None
