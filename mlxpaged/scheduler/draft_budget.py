"""Decides how many draft tokens a step verifies: as many as bring the most tokens per second.

A draft costs a row. A row is nearly free on some devices and as dear as a token on others, and the time of a step by
its rows has plateaus, so all totals are compared. Where no total is faster than no drafts, none are verified.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as ListOf

from mlxpaged.scheduler.row_table import SHORTEST

MOST_DRAFTS = 8
"""Most drafts of a sequence in a step."""

MOST_STATES = 8
"""Most sequences with drafts in a step of a model with recurrent states: the states before their rows are kept, which
take 154 MB each in Qwen3.5-27B."""

LENGTHS = (1, 2, 4, 8)
"""Numbers of drafts that a sequence may have: few, so that steps of as many rows come again and are replayed."""

SPANS = tuple(itertools.pairwise((0, *LENGTHS)))

MOST_LOSS = 0.02
"""Share of its speed that a sequence may lose to drafts: its own that are rejected, and those of others."""

MOST_LEAD, MOST_WAIT = 4.0, 0.5
"""Steps that a sequence can be ahead, and those of them that it waits at once."""

LEAST_CHANCE = 0.02
"""Drafts that are less likely are not considered."""

LEAST_GAIN = 1.03
"""Drafts must make a step so many times as fast, because their chances and the times are estimates."""

PROBE_SHARE = 0.01
"""Share of the time that probes may take."""

TIME_AGAIN, CLEAR_GAIN = 16, 1.5
"""After so many steps with drafts one goes without, unless they make steps so many times as fast: what a step without
takes must be known, or drafts that have ceased to pay would never be found out."""

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
    lead: how far the sequence is ahead, in steps without drafts: by the tokens that its drafts were likely to bring and
    the MOST_LOSS that is allowed, less what steps took longer. So long it can wait for the drafts of others.
    """

    def __init__(self, shared: list[float]) -> None:
        self._shared = shared
        self._tried = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._accepted = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._waited = 0
        self._probe_after = PROBE_TOKENS
        self.lead = MOST_WAIT

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


def most_wait(leads: ListOf[float], lengths: ListOf[int]) -> float:
    """Returns how much longer a step may take, in steps without drafts. Nothing limits it if each sequence has some."""
    lead = min((lead for lead, length in zip(leads, lengths, strict=True) if length == 0), default=math.inf)
    return lead if lead == math.inf else min(max(lead, 0.0), MOST_WAIT)


def draft_lengths(
    contexts: ListOf[int],
    chances: ListOf[ListOf[float]],
    seconds: Callable[[int, int], float],
    costs: ListOf[float] = (),
    exposed: float = 0.0,
    leads: ListOf[float] = (),
) -> list[int]:
    """Returns how many of its drafts each decoding sequence verifies, one of LENGTHS or 0.

    contexts: context lengths of the sequences. chances: for each sequence, see `Acceptance.chances`. seconds: time of a
    decoding step with so many rows that attend to so many keys together. costs: of a draft of each sequence before it
    is verified, as a share of a step without drafts; those of several sequences are made at once. By default 0.
    exposed: seconds in which the device waits before a step with drafts. leads: see `Acceptance`, by default MOST_WAIT
    for all. A sequence of which no draft is verified waits no longer for those of others.
    """
    rows, keys, tokens = len(contexts), sum(contexts), float(len(contexts))
    lengths = [0] * rows
    plain = seconds(rows, keys)
    if plain <= 0:
        return lengths  # too little is known
    leads = leads or [MOST_WAIT] * rows
    making = 0.0
    most, best = LEAST_GAIN * tokens / plain, list(lengths)
    steps = [
        (chance, costs[i] if costs else 0.0, i, length)
        for i, each in enumerate(chances)
        for first, length in SPANS
        if length <= len(each) and (chance := sum(each[first:length]) / (length - first)) > LEAST_CHANCE
    ]
    for chance, cost, i, length in sorted(steps, key=lambda step: step[1] - step[0]):  # those of a sequence in order
        more = length - lengths[i]
        lengths[i], rows, keys, tokens = length, rows + more, keys + more * contexts[i], tokens + more * chance
        making = max(making, length * plain * cost)
        took = seconds(rows, keys) + making + exposed
        if tokens / took > most and took <= plain * (1 + most_wait(leads, lengths)):
            most, best = tokens / took, list(lengths)
    return best


class ProbeBudget:
    """Lets one sequence of a step have a draft to see whether it is accepted, if its row is not too dear."""

    def __init__(self) -> None:
        self._saved = 0.0  # steps without drafts

    def spend(self, contexts: ListOf[int], i: int, seconds: Callable[[int, int], float]) -> bool:
        """Whether the sequence of this number may have it. Its step takes longer by a row."""
        rows, keys = len(contexts), sum(contexts)
        cost = seconds(rows + 1, keys + contexts[i]) / max(seconds(rows, keys), SHORTEST) - 1
        if cost > self._saved:
            return False
        self._saved -= max(0.0, cost)
        return True

    def save(self) -> None:
        """After each step."""
        self._saved = min(self._saved + PROBE_SHARE, 1.0)


def gain_of(
    lengths: ListOf[int], contexts: ListOf[int], chances: ListOf[ListOf[float]], seconds: Callable[[int, int], float]
) -> float:
    """Returns how many times as many tokens per second as without these drafts are expected. See `draft_lengths`."""
    rows, keys = len(contexts), sum(contexts)
    tokens = rows + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
    all_keys = sum((1 + length) * context for length, context in zip(lengths, contexts, strict=True))
    return tokens / rows * seconds(rows, keys) / max(seconds(rows + sum(lengths), all_keys), SHORTEST)


def of_few(lengths: ListOf[int], chances: ListOf[ListOf[float]], most: int) -> list[int]:
    """Returns the lengths, but 0 for all except `most` sequences, those whose drafts bring the most tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -sum(chances[i][: lengths[i]]))
    chosen = set(order[:most])
    return [length if i in chosen else 0 for i, length in enumerate(lengths)]
