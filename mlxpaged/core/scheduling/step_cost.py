"""Estimates what a step costs. It learns from the steps that ran.

The time of a step is a sum of five parts with one coefficient each: the step itself, its decoding rows, the keys that
these attend to, its prompt tokens, and the keys that those attend to. The coefficients are a least squares fit of the
relative errors over the latest steps, and none is negative. So chunks become shorter as their context grows, on a
machine that computes 500 tokens a second and on one that computes 5,000, without any setting.

A step without prompts has few rows, and in these its time is not linear: a GPU has other kernels for one row, for a few
and for many. So there is a table of these steps by their rows. It begins with steps that are timed at the start. Keys
cost what the fit says.
"""

from __future__ import annotations

import bisect
import sys
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mlxpaged.core.scheduling.row_table import NOTHING_TIMED, SHORTEST, RowTable, RowTimes
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles

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

DECODE_KEYS, PROMPT_TOKENS, PROMPT_KEYS = 2, 3, 4
"""Indices in the five parts."""

FIT_AGAIN, TABLE_AGAIN = 32, 8
"""Steps without prompts after which what their keys cost is fitted again, and the table is made again, for drafts. A
fit takes 0.4 ms on a slow CPU, and the table 0.1."""

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

    longest_chunk, longest_context: tokens up to which the coefficients may be trusted. tiles: in which rows are
    computed. What fills a tile counts as prompt tokens.
    """

    per_step: float
    per_decode: float
    per_decode_key: float
    per_prompt_token: float
    per_prompt_key: float
    longest_chunk: int = sys.maxsize
    longest_context: int = sys.maxsize
    tiles: RowTiles = ANY_ROWS
    table: RowTable = NOTHING_TIMED

    def step_seconds(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]] = ()) -> float:
        """Time of a step. contexts: context lengths of its decoding sequences. chunks: (start, tokens) of its
        prompts."""
        if not chunks:
            return self.decode_seconds(len(contexts), sum(contexts))
        tokens = sum(tokens for _, tokens in chunks)
        keys = sum(chunk_keys(start, tokens) for start, tokens in chunks)
        filled = self.tiles.padded(len(contexts) + tokens) - self.tiles.padded(len(contexts))
        return self.linear_seconds(contexts) + self.per_prompt_token * filled + self.per_prompt_key * keys

    def decode_seconds(self, rows: int, keys: int) -> float:
        """Time of a step of so many decoding rows, which attend to so many keys together."""
        if not self.table.rows:
            return self._linear_seconds(rows, keys)
        return self.table.of(self.tiles.padded(rows), self.per_decode) + self.table.per_key * keys

    def linear_seconds(self, contexts: ListOf[int]) -> float:
        """What decoding sequences with these context lengths take of a step with prompts, the step itself included."""
        return self._linear_seconds(len(contexts), sum(contexts))

    def _linear_seconds(self, rows: int, keys: int) -> float:
        return self.per_step + self.per_decode * self.tiles.padded(rows) + self.per_decode_key * keys

    def chunk_seconds(self, start: int, tokens: int, rows: int = 0) -> float:
        """What a chunk of a prompt adds to a step with prompts that has so many rows."""
        filled = self.tiles.padded(rows + tokens) - self.tiles.padded(rows)
        return self.per_prompt_token * filled + self.per_prompt_key * chunk_keys(start, tokens)

    def chunk_within(self, seconds: float, start: int, most: int, rows: int = 0) -> int:
        """The most tokens from `start` on, up to `most`, that are expected to add at most `seconds` to a step of so
        many rows."""
        sizes = range(1, min(most, self.longest_chunk) + 1)
        return bisect.bisect_right(sizes, seconds, key=lambda tokens: self.chunk_seconds(start, tokens, rows))

    def prefill_seconds(self, start: int, tokens: int, max_chunk: int) -> float:
        """Time of the tokens from `start` on, without other work, in steps of at most `max_chunk` tokens. Tokens beyond
        longest_context are not counted, so the estimate is too low rather than too high."""
        end = start + max(0, min(tokens, self.longest_context - start))
        return sum(self.step_seconds([], [(at, min(max_chunk, end - at))]) for at in range(start, end, max_chunk))


class StepCost:
    """Learns from every finished step, and estimates the costs of later ones."""

    def __init__(self, tiles: RowTiles = ANY_ROWS, decoding: Mapping[int, float] = MappingProxyType({})) -> None:
        """decoding: seconds of steps of so many decoding rows with short contexts."""
        self._tiles = tiles
        self._plain: Observations = deque(maxlen=KEPT)
        self._with_prompts: Observations = deque(maxlen=KEPT)
        self._by_rows = RowTimes({tiles.padded(rows): max(seconds, SHORTEST) for rows, seconds in decoding.items()})
        self._costs: Costs | None = None
        self._is_current = True
        self._since_fit = 0
        self._decoding: Costs | None = None

    def observe(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]], seconds: float) -> None:
        """A step took `seconds`. contexts: of its decoding sequences. chunks: (start, tokens) of its prompts."""
        if (expected := self.estimate(contexts, chunks)) is not None:
            seconds = min(seconds, OUTLIER * expected)
        rows = self._tiles.padded(len(contexts))
        filled = self._tiles.padded(len(contexts) + sum(tokens for _, tokens in chunks)) - rows
        keys = sum(chunk_keys(start, tokens) for start, tokens in chunks)
        parts, seconds = (1, rows, sum(contexts), filled, keys), max(seconds, SHORTEST)
        (self._with_prompts if chunks else self._plain).append((parts, seconds))
        if not chunks:
            self._by_rows.observe(rows, sum(contexts), seconds)
            self._since_fit += 1
        self._is_current = False
        if self._since_fit % TABLE_AGAIN == 0:
            self._decoding = None

    def costs(self) -> Costs | None:
        """Return None before any step with a prompt ran."""
        if self._with_prompts and not self._is_current:
            parts, seconds = zip(*self._plain, *self._with_prompts, strict=True)
            relative = np.asarray(parts) / SCALE / np.asarray(seconds)[:, None]
            coefficients = non_negative_least_squares(relative, np.ones(len(seconds))) / SCALE
            self._by_rows.learn_keys(float(coefficients[DECODE_KEYS]))
            # A short chunk may fit into the tile of the decoding rows, and then it fills nothing.
            tokens = [(max(1.0, parts[PROMPT_TOKENS]), parts[PROMPT_KEYS]) for parts, _ in self._with_prompts]
            self._costs = replace(
                Costs(*coefficients.tolist()),
                longest_chunk=EXTRAPOLATION * int(max(count for count, _ in tokens)),
                longest_context=EXTRAPOLATION * int(max(keys / count + count / 2 for count, keys in tokens)),
                tiles=self._tiles,
                table=self._by_rows.table(),
            )
            self._is_current, self._since_fit, self._decoding = True, 0, None
        return self._costs

    def decoding_costs(self) -> Costs | None:
        """The costs, for steps without prompts. Before any step with a prompt ran, all that is known is what steps of
        so many rows took. None if that is not known either."""
        if self._decoding is None:
            costs = self._costs if self._since_fit < FIT_AGAIN else self.costs()
            table = self._by_rows.table()
            if costs is not None:
                self._decoding = replace(costs, table=table)
            elif table.rows:
                self._decoding = Costs(0.0, 0.0, 0.0, 0.0, 0.0, tiles=self._tiles, table=table)
        return self._decoding

    def estimate(self, contexts: ListOf[int], chunks: ListOf[tuple[int, int]]) -> float | None:
        """Estimates a step by the costs that `costs` has returned last. None before it has."""
        return None if self._costs is None else self._costs.step_seconds(contexts, chunks)

    def row_seconds(self) -> dict[int, float]:
        """Seconds of steps without prompts by their rows, beside what their keys take."""
        table = self._by_rows.table()
        return dict(zip(map(round, table.rows), table.seconds, strict=True))

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
