"""A limit on the tokens of an answer's thinking. When it is reached, the closing tag is forced."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence


class ThinkingBudget:
    """Follows the tokens of one answer.

    limit: tokens in all think blocks together. A block that opens after that may still have one token, unless the limit
    is 0.
    start, end: the tokens of the tags. inside: whether the answer begins in a think block. following: tags that end a
    block, too. calls: tags that begin a call.
    """

    def __init__(
        self,
        limit: float,
        start: Sequence[int],
        end: Sequence[int],
        inside: bool,
        following: Iterable[Sequence[int]] = (),
        calls: Iterable[Sequence[int]] = (),
    ) -> None:
        self._left = limit
        self._least = min(limit, 1)
        self._start, self._end = list(start), list(end)
        self._ends = [self._end, *map(list, following)]
        self._calls = list(map(list, calls))
        self._longest = max(map(len, [self._start, *self._ends, *self._calls]))
        self._may_be_closed = True  # no block was closed, and no call begun
        self._inside = inside
        self._recent: list[int] = []  # the latest tokens, as many as the longest tag has
        self._closing = 0  # tokens of the closing tag that were forced so far

    @property
    def close(self) -> int | None:
        """The token to take in place of an end token: the closing tag, if it is one token, in the first block of an
        answer. After a call there is none: models write calls in open thoughts, and end with them."""
        return self._end[0] if self._inside and self._may_be_closed and len(self._end) == 1 else None

    def forced(self) -> int | None:
        """The token that must come next; None if any token may."""
        return next(iter(self.closing()), None)

    def closing(self) -> list[int]:
        """The tokens that must come next: the rest of the closing tag once the limit is reached."""
        return self._end[self._closing :] if self._inside and self._left <= 0 else []

    def after(self, token_ids: Iterable[int]) -> ThinkingBudget:
        """What it would be after these tokens."""
        later = copy.copy(self)
        for token_id in token_ids:
            later.add(token_id)
        return later

    def add(self, token_id: int) -> None:
        """Note the next token. If another one was forced, the closing tag is forced again from its start."""
        if token_id == self.forced():
            self._closing += 1
            if self._closing == len(self._end):
                self._inside, self._closing, self._recent, self._may_be_closed = False, 0, [], False
            return
        self._recent = [*self._recent, token_id][-self._longest :]
        self._left -= self._inside
        self._closing = 0
        if any(self._recent[-len(tag) :] == tag for tag in self._calls):
            self._may_be_closed = False
        if any(self._recent[-len(tag) :] == tag for tag in (self._ends if self._inside else [self._start])):
            self._may_be_closed &= not self._inside
            self._inside, self._recent = not self._inside, []
            self._left = max(self._left, self._least)
