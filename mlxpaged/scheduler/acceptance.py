"""How often the drafts of a sequence are accepted, and how far it is ahead by them or behind by those of others."""

from __future__ import annotations

import bisect

MOST_DRAFTS = 8
"""Most drafts of a sequence in a step."""

MOST_LOSS = 0.02
"""Share of its speed that a sequence may lose to drafts: its own that are rejected, and those of others."""

MOST_LEAD = 4.0
"""Steps that a sequence can be ahead or behind."""

DECAY = 0.95
"""What older drafts count for each one that comes after them."""

IDLE_DECAY = 0.995
"""What they count for each token without drafts after them."""

PRIOR_WEIGHT = 2.0
"""The rate of a draft that follows others begins at the rate of the one before it, which counts as so many drafts."""

MATCHES = (3, 8)
"""Drafts after a match of at least so many tokens are accepted more often, and counted apart."""

BY_NETWORK = -1
"""Instead of a match, for drafts of the model's own head."""

PRIORS = (0.4, 0.5, 0.75, 0.7)
"""Chance of the first draft of a row before any was verified: after matches of two tokens, from three and from eight
on, and by a head."""

SHARED_DECAY = 0.98
"""As DECAY, for the chance of the first draft of a sequence that has none yet, which is that of all others."""

PROBE_TOKENS, LONGEST_PROBE = 32, 512
"""After so many tokens of an answer without drafts, one is verified to see whether their chances are better now. The
number doubles after each probe that fails."""


class Acceptance:
    """How often the drafts of a sequence are accepted, by their number in the row, if those before them are.

    shared: the chances of first drafts, in the order of PRIORS, which all sequences of an engine keep up together.
    lead: how far the sequence is ahead, in steps without drafts: by the tokens that its drafts have brought and the
    MOST_LOSS that is allowed, less what steps took longer. So long it can wait for drafts.
    """

    def __init__(self, shared: list[float]) -> None:
        self._shared = shared
        self._tried = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._accepted = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._waited = 0
        self._probe_after = PROBE_TOKENS
        self.lead = 0.0

    def chances(self, match: int, count: int) -> list[float]:
        """The chance of each of `count` drafts that it and those before it are accepted. match: tokens of the text that
        the drafts continue which were found elsewhere, or BY_NETWORK."""
        kind = kind_of(match)
        chances, chance, rate = [], 1.0, self._shared[kind]
        weight = IDLE_DECAY**self._waited
        for tried, accepted in zip(self._tried[kind][:count], self._accepted[kind], strict=False):
            rate = (weight * accepted + PRIOR_WEIGHT * rate) / (weight * tried + PRIOR_WEIGHT)
            chance *= rate
            chances.append(chance)
        return chances

    @property
    def is_probe_due(self) -> bool:
        return self._waited >= self._probe_after

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Count a row's drafts. The one after the accepted ones was rejected; nothing is known of the others."""
        self.wait(-MOST_LOSS)
        if drafted == 0:
            self._waited += 1
            return
        kind = kind_of(match)
        self._shared[kind] = SHARED_DECAY * self._shared[kind] + (1 - SHARED_DECAY) * (accepted > 0)
        weight = DECAY * IDLE_DECAY**self._waited
        for number in range(MOST_DRAFTS):  # what is known of drafts that are not tried any more fades too
            is_known = number < min(drafted, accepted + 1)
            self._tried[kind][number] = weight * self._tried[kind][number] + is_known
            self._accepted[kind][number] = weight * self._accepted[kind][number] + (number < accepted)
        if self.is_probe_due:
            self._probe_after = PROBE_TOKENS if accepted else min(LONGEST_PROBE, 2 * self._probe_after)
        self._waited = 0

    def wait(self, steps: float) -> None:
        """A step with drafts took so much longer than its tokens were worth, in steps without."""
        self.lead = min(max(self.lead - steps, -MOST_LEAD), MOST_LEAD)


def kind_of(match: int) -> int:
    """The index of PRIORS."""
    return len(MATCHES) + 1 if match == BY_NETWORK else bisect.bisect(MATCHES, match)
