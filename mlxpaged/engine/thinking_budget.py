"""A limit on the tokens of an answer's thinking: when it is reached, the closing tag is what comes next."""

from __future__ import annotations

from collections.abc import Sequence


class ThinkingBudget:
    """Follows the tokens of one answer.

    limit: tokens in all think blocks together, at least 1. A block that opens when they are spent still gets one: the
    step behind its opening tag may be under way before that is known. start, end: the tags' tokens. inside: whether the
    answer begins in a think block.
    """

    def __init__(self, limit: int, start: Sequence[int], end: Sequence[int], inside: bool) -> None:
        self._left = limit
        self._start, self._end = list(start), list(end)
        self._inside = inside
        self._recent: list[int] = []  # no tag is longer
        self._closing = 0  # tokens of the closing tag that were forced

    def forced(self) -> int | None:
        """The token that has to come next; None for whichever is drawn."""
        return self._end[self._closing] if self._inside and self._left <= 0 else None

    def may_force_after_next(self) -> bool:
        """Whether one more token, not known yet, could spend the budget."""
        return self._inside and self._left <= 1

    def add(self, token_id: int) -> None:
        """The token that did come next. It need not be the one that had to: then that one has to come behind it."""
        if token_id == self.forced():
            self._closing += 1
            if self._closing == len(self._end):
                self._inside, self._closing, self._recent = False, 0, []
            return
        self._recent = [*self._recent, token_id][-max(len(self._start), len(self._end)) :]
        self._left -= self._inside
        self._closing = 0
        tag = self._end if self._inside else self._start
        if self._recent[-len(tag) :] == tag:
            self._inside, self._recent = not self._inside, []
            self._left = max(self._left, 1)
