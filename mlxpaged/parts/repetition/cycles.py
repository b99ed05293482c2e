"""Finds cycles at the end of a sequence of tokens: the same tokens again and again, without a new one between them.

A cycle has an exact period: each of its tokens is the one that many tokens before it. The time for a token does not
depend on the length of the sequence or of the period.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WINDOW = 16
"""A period is followed after this many tokens of its second copy."""
STRIDE = 8
"""Every eighth window is remembered: an answer of 32,000 tokens then takes less than a megabyte. A period is found up
to seven tokens later, and the beginning of its first copy is looked up then."""


class Cycle(NamedTuple):
    """The last `length` tokens repeat their last `period` tokens, and no fewer than these."""

    period: int
    length: int

    @property
    def copies(self) -> int:
        """The complete ones, the first included."""
        return self.length // self.period


class CycleFinder:
    """Takes the tokens of one answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[int, int] = {}  # of windows: by the hash of the tokens, how many tokens there were at its end
        self._starts: dict[int, int] = {}  # of cycles that go on until now: by the period, where the first copy begins

    def add(self, token_id: int) -> None:
        tokens, starts = self.tokens, self._starts
        tokens.append(token_id)
        if starts:
            for period in [each for each in starts if tokens[-1 - each] != token_id]:
                del starts[period]
        end = len(tokens)
        if end < WINDOW:
            return
        window = hash(tuple(tokens[-WINDOW:]))
        before = self._ends.get(window)
        if before is not None:
            self._follow(end - before)
        if end % STRIDE == 0:
            self._ends[window] = end

    def cycles(self) -> Iterator[Cycle]:
        """Yields the cycles at the end of the tokens, those of at least two copies among them. No period is a multiple
        of another one's."""
        end = len(self.tokens)
        for period, start in self._starts.items():
            yield Cycle(period, end - start)

    def _follow(self, period: int) -> None:
        """The last window came so many tokens before, too."""
        if any(period % each == 0 for each in self._starts):
            return
        tokens, start = self.tokens, len(self.tokens) - period
        while start and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - period - start >= WINDOW:  # otherwise only the hashes are equal
            self._starts[period] = start
