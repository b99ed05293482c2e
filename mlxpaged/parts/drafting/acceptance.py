"""How often the drafts of a sequence are accepted, and how far it is ahead by them or behind by those of others."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MOST_DRAFTS = 8
"""Most drafts of a sequence in a step."""

MOST_LOSS = 0.01
"""Share of its speed that a sequence may lose to drafts: its own that are rejected, and those of others."""

MOST_LEAD = 4.0
"""Steps that a sequence can be ahead or behind."""

DECAY = 0.95
"""What older drafts count for each one that comes after them."""

IDLE_DECAY = 0.995
"""What they count for each token without drafts after them."""

PRIOR_WEIGHT = 4.0
"""The rate of a draft that follows others begins at the rate of the one before it, which counts as so many drafts."""

LEAST_CHANCE = 0.002
"""Drafts that are less likely are not considered."""

MATCHES = (3, 8)
"""Drafts after a match of at least so many tokens are accepted more often, and counted apart."""

BY_NETWORK = -1
"""Instead of a match, for drafts of the model's own head."""

PRIORS = (0.4, 0.5, 0.75, 0.7)
"""Chance of the first draft of a row before any was verified: after matches of two tokens, from three and from eight
on, and by a head."""

WORTH_SEARCHING, SEARCH_EVERY = 0.25, 4
"""While fewer drafts than this of each step are accepted, the text is searched in every fourth step only, until one is
accepted: to search takes time, and a step that may have drafts is not launched while another runs."""

SEARCHES = 16
"""Latest steps that were searched for drafts of which the accepted ones are the average."""

PROBE_TOKENS = 32
"""After so many tokens of an answer without drafts, one is verified to see whether their chances are better now. All
such probes together take no more than PROBE_SHARE of the time."""


@dataclass
class StepCounts:
    """What an engine has counted, which its sequences look back to. So a step without drafts costs nothing for each.

    count: steps so far. lost: how much longer they were for drafts, in steps without, less the MOST_LOSS of each.
    """

    count: int = 0
    lost: float = 0.0

    def end_step(self) -> None:
        self.count += 1
        self.lost -= MOST_LOSS

    def lose(self, steps: float) -> None:
        """A step took so many steps longer for its drafts; below 0, shorter."""
        self.lost += steps


class Acceptance:
    """How often the drafts of a sequence are accepted, by their number in the row, if those before them are.

    shared: the chances of first drafts, in the order of PRIORS, which all sequences of an engine keep up together. A
    sequence that has none yet begins with them.
    """

    def __init__(self, shared: list[float], steps: StepCounts) -> None:
        self._shared = shared
        self._steps = steps
        self._tried = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._accepted = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._drafted_at = self._searched_at = steps.count
        self._brought = 2 * WORTH_SEARCHING
        self._ahead, self._lost_before = 0.0, steps.lost

    @property
    def lead(self) -> float:
        """How far the sequence is ahead, in steps without drafts: by the tokens that its drafts have brought and the
        MOST_LOSS that is allowed, less what steps took longer. Less than 0 if it is behind."""
        return min(max(self._ahead - (self._steps.lost - self._lost_before), -MOST_LEAD), MOST_LEAD)

    @property
    def is_probe_due(self) -> bool:
        return self._steps.count - self._drafted_at >= PROBE_TOKENS

    @property
    def searches(self) -> bool:
        """Whether the text is searched for drafts of the next step."""
        return self._brought >= WORTH_SEARCHING or self._steps.count - self._searched_at >= SEARCH_EVERY

    def chances(self, match: int, count: int) -> list[float]:
        """The chance of each of `count` drafts that it and those before it are accepted, up to the first one that is
        less than LEAST_CHANCE. match: tokens of the text that the drafts continue which were found elsewhere, or
        BY_NETWORK."""
        kind = kind_of(match)
        chances, chance, rate = [], 1.0, self._shared[kind]
        weight = IDLE_DECAY ** (self._steps.count - self._drafted_at)
        for tried, accepted in zip(self._tried[kind][:count], self._accepted[kind], strict=False):
            rate = (weight * accepted + PRIOR_WEIGHT * rate) / (weight * tried + PRIOR_WEIGHT)
            chance *= rate
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances

    def end_search(self, accepted: int) -> None:
        """The text was searched, and so many of the drafts were accepted. If some were, it is searched again. If none,
        it is in the same step as others, because few drafts of several may be worth a step that one's are not."""
        self._brought += (accepted - self._brought) / SEARCHES
        count = self._steps.count
        self._searched_at = count - (SEARCH_EVERY if accepted else count % SEARCH_EVERY)

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Count a row's drafts. The one after the accepted ones was rejected; nothing is known of the others."""
        kind = kind_of(match)
        self._shared[kind] = DECAY * self._shared[kind] + (1 - DECAY) * (accepted > 0)
        weight = DECAY * IDLE_DECAY ** max(0, self._steps.count - self._drafted_at - 1)
        for number in range(MOST_DRAFTS):  # what is known of drafts that are not tried any more fades too
            is_known = number < min(drafted, accepted + 1)
            self._tried[kind][number] = weight * self._tried[kind][number] + is_known
            self._accepted[kind][number] = weight * self._accepted[kind][number] + (number < accepted)
        self._drafted_at = self._steps.count
        self.advance(accepted)

    def advance(self, accepted: int) -> None:
        """Drafts have brought so many tokens."""
        self._ahead, self._lost_before = min(self.lead + accepted, MOST_LEAD), self._steps.lost


def kind_of(match: int) -> int:
    """The index of PRIORS."""
    return len(MATCHES) + 1 if match == BY_NETWORK else bisect.bisect(MATCHES, match)
