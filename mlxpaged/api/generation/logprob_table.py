"""Keeps the log-probabilities of an answer until it is complete.

As records, those of 23,000 tokens with the 20 most likely ones each are half a million objects: they take ten times the
memory, and the garbage collector, which stops all threads, took 0.65 seconds for a look at them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import overload

from mlxpaged.core.engine.logprobs import TokenLogprobs


class LogprobTable(Sequence[TokenLogprobs]):
    """The tokens of an answer in their order. A record is made when it is read."""

    def __init__(self) -> None:
        self._ids = array("i")  # of each token, and of those that are most likely in its place
        self._logprobs = array("d")
        self._starts = array("q", [0])  # places of the tokens in these arrays, and the end

    def add(self, tokens: Sequence[TokenLogprobs]) -> Sequence[TokenLogprobs]:
        """Returns what was added, as a part of the table."""
        start = len(self)
        for token in tokens:
            pairs = chain([(token.token_id, token.logprob)], token.top)
            ids, logprobs = zip(*pairs, strict=True)
            self._ids.extend(ids)
            self._logprobs.extend(logprobs)
            self._starts.append(len(self._ids))
        return Part(self, range(start, len(self)))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return Part(self, range(len(self))[index])
        at = range(len(self))[index]
        start, end = self._starts[at], self._starts[at + 1]
        top = zip(self._ids[start + 1 : end], self._logprobs[start + 1 : end], strict=True)
        return TokenLogprobs(self._ids[start], self._logprobs[start], tuple(top))

    @property
    def total(self) -> float:
        """The sum over the tokens themselves."""
        return sum(map(self._logprobs.__getitem__, self._starts[:-1]))


class Part(Sequence[TokenLogprobs]):
    """Some tokens of a table."""

    __slots__ = ("_numbers", "_table")

    def __init__(self, table: LogprobTable, numbers: range) -> None:
        self._table, self._numbers = table, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return Part(self._table, self._numbers[index])
        return self._table[self._numbers[index]]
