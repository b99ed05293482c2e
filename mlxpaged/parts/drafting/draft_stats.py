"""What speculative decoding has done: counts of drafts, and what steps with drafts brought beside plain ones."""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0
"""Seconds between two lines of the log."""

DRAFTERS = ("grammar", "ngram", "mtp", "model")
"""What drafts: a grammar or a limit on thinking that leaves no choice, the text, the model's draft head, or a smaller
model."""


class DraftCounts(NamedTuple):
    """Draft tokens that were verified, and those of them that were sampled."""

    drafted: int = 0
    accepted: int = 0


class DraftGain(NamedTuple):
    """The steps that only decode, added up. rows: sequences of each. plain_tokens: tokens that steps without drafts are
    estimated to bring in the same time."""

    steps: int = 0
    with_drafts: int = 0
    rows: int = 0
    tokens: int = 0
    plain_tokens: float = 0.0

    def plus(self, has_drafts: bool, rows: int, tokens: int, plain_tokens: float) -> DraftGain:
        """One more step."""
        counts = self.steps + 1, self.with_drafts + has_drafts, self.rows + rows
        return DraftGain(*counts, self.tokens + tokens, self.plain_tokens + plain_tokens)

    def since(self, earlier: DraftGain) -> DraftGain:
        """The steps that came after `earlier`."""
        steps, with_drafts, rows, tokens, plain_tokens = (a - b for a, b in zip(self, earlier, strict=True))
        return DraftGain(int(steps), int(with_drafts), int(rows), int(tokens), plain_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a sequence gets of a step. 1.0 without drafts."""
        return self.tokens / self.rows if self.rows else 1.0

    @property
    def share_of_steps(self) -> float:
        """The share of the steps that have drafts."""
        return self.with_drafts / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """How many times as many tokens as steps without drafts would have brought in the same time."""
        return self.tokens / self.plain_tokens if self.plain_tokens else 1.0


class DraftStats(NamedTuple):
    """counts: of each of DRAFTERS, in order."""

    counts: tuple[DraftCounts, ...] = (DraftCounts(),) * len(DRAFTERS)
    gain: DraftGain = DraftGain()

    @property
    def drafted_total(self) -> int:
        return sum(each.drafted for each in self.counts)

    @property
    def accepted_total(self) -> int:
        return sum(each.accepted for each in self.counts)

    def more(self, drafter: str, drafted: int, accepted: int) -> DraftStats:
        counts = list(self.counts)
        before = counts[index := DRAFTERS.index(drafter)]
        counts[index] = DraftCounts(before.drafted + drafted, before.accepted + accepted)
        return self._replace(counts=tuple(counts))


NO_DRAFTS = DraftStats()


class GainLog:
    """Writes a line of each minute in which steps had drafts."""

    def __init__(self, now: float) -> None:
        self._since, self._before = now, DraftGain()

    def write(self, gain: DraftGain, now: float) -> None:
        """now: seconds."""
        if now - self._since < LOG_SECONDS:
            return
        latest = gain.since(self._before)
        self._since, self._before = now, gain
        if latest.with_drafts:
            logger.info(
                "drafts: %.2f tokens a pass, in %.0f %% of %d decoding steps; %.2f times the tokens of plain steps",
                latest.tokens_per_pass,
                100 * latest.share_of_steps,
                latest.steps,
                latest.speedup,
            )
