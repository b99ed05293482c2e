"""Decides how many draft tokens a step verifies: as many as bring the most tokens per second.

A draft costs a row. A row is nearly free on some devices and as dear as a token on others, and the time of a step by
its rows has plateaus, so all totals are compared. Where no total is faster than no drafts, none are verified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as ListOf

MOST_DRAFTS = 8
"""Most drafts of a sequence in a step."""

MOST_STATES = 8
"""Most sequences with drafts in a step of a model with recurrent states: the states before their rows are kept, which
take 154 MB each in Qwen3.5-27B."""

LENGTHS = (1, 2, 4, 8)
"""Numbers of drafts that a sequence may have: few, so that steps of as many rows come again and are replayed."""

SLOWEST = 1.5
"""A step takes at most this many times as long as without drafts if a sequence has none: it waits for the others."""

LEAST_GAIN = 1.03
"""Drafts must make a step so many times as fast, because their chances and the times are estimates."""

DECAY = 0.95
"""What older drafts count for each one that comes after them."""

PRIOR_WEIGHT = 2.0
"""The rate of a draft that follows others begins at the rate of the one before it, which counts as so many drafts."""

LONG_MATCH = 8
"""Drafts after a match of at least so many tokens are accepted more often, and counted apart."""

BY_NETWORK = -1
"""Instead of a match, for drafts of the model's own head."""

PRIORS = (0.5, 0.75, 0.7)
"""Chance of the first draft of a row before any was verified: after a short match, after a long one, by a head."""

SHARED_DECAY = 0.98
"""As DECAY, for the chance of the first draft of a sequence that has none yet, which is that of all others."""

PROBE_TOKENS, LONGEST_PROBE = 32, 512
"""After so many tokens of an answer without drafts, one is verified to see whether their chances are better now. The
number doubles after each probe that fails."""


class Acceptance:
    """How often the drafts of a sequence are accepted, by their number in the row, if those before them are.

    shared: the chances of first drafts, in the order of PRIORS, which all sequences of an engine keep up together.
    """

    def __init__(self, shared: list[float]) -> None:
        self._shared = shared
        self._tried = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._accepted = [[0.0] * MOST_DRAFTS for _ in PRIORS]
        self._waited = 0
        self._probe_after = PROBE_TOKENS

    def chances(self, match: int, count: int) -> list[float]:
        """The chance of each of `count` drafts that it and those before it are accepted. match: tokens of the text that
        the drafts continue which were found elsewhere, or BY_NETWORK."""
        kind = kind_of(match)
        chances, chance, rate = [], 1.0, self._shared[kind]
        for tried, accepted in zip(self._tried[kind][:count], self._accepted[kind], strict=False):
            rate = (accepted + PRIOR_WEIGHT * rate) / (tried + PRIOR_WEIGHT)
            chance *= rate
            chances.append(chance)
        return chances

    @property
    def is_probe_due(self) -> bool:
        return self._waited >= self._probe_after

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Count a row's drafts. The one after the accepted ones was rejected; nothing is known of the others."""
        if drafted == 0:
            self._waited += 1
            return
        kind = kind_of(match)
        self._shared[kind] = SHARED_DECAY * self._shared[kind] + (1 - SHARED_DECAY) * (accepted > 0)
        for number in range(min(drafted, accepted + 1)):
            self._tried[kind][number] = DECAY * self._tried[kind][number] + 1
            self._accepted[kind][number] = DECAY * self._accepted[kind][number] + (number < accepted)
        if self.is_probe_due:
            self._probe_after = PROBE_TOKENS if accepted else min(LONGEST_PROBE, 2 * self._probe_after)
        self._waited = 0


def kind_of(match: int) -> int:
    """The index of PRIORS."""
    return 2 if match == BY_NETWORK else int(match >= LONG_MATCH)


def draft_lengths(
    contexts: ListOf[int],
    chances: ListOf[ListOf[float]],
    seconds: Callable[[int, int], float],
    costs: ListOf[float] = (),
    exposed: float = 0.0,
) -> list[int]:
    """Returns how many of its drafts each decoding sequence verifies, one of LENGTHS or 0.

    contexts: context lengths of the sequences. chances: for each sequence, see `Acceptance.chances`. seconds: time of a
    decoding step with so many rows that attend to so many keys together. costs: of a draft of each sequence before it
    is verified, as a share of a step without drafts; those of several sequences are made at once. By default 0.
    exposed: seconds in which the device waits before a step with drafts.
    """
    rows, keys, tokens = len(contexts), sum(contexts), float(len(contexts))
    lengths = [0] * rows
    plain = seconds(rows, keys)
    if plain <= 0:
        return lengths  # too little is known
    longest = SLOWEST * plain if not all(chances) else math.inf
    making = 0.0
    most, best = LEAST_GAIN * tokens / plain, list(lengths)
    steps = [
        (sum(each[first:length]) / (length - first), costs[i] if costs else 0.0, i, length)
        for i, each in enumerate(chances)
        for first, length in itertools.pairwise((0, *LENGTHS))
        if length <= len(each)
    ]
    for chance, cost, i, length in sorted(steps, key=lambda step: step[1] - step[0]):  # those of a sequence in order
        more = length - lengths[i]
        lengths[i], rows, keys, tokens = length, rows + more, keys + more * contexts[i], tokens + more * chance
        making = max(making, length * plain * cost)
        took = seconds(rows, keys) + making + exposed
        if took <= longest and tokens / took > most:
            most, best = tokens / took, list(lengths)
    return best


def of_few(lengths: ListOf[int], chances: ListOf[ListOf[float]], most: int) -> list[int]:
    """Returns the lengths, but 0 for all except `most` sequences, those whose drafts bring the most tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -sum(chances[i][: lengths[i]]))
    chosen = set(order[:most])
    return [length if i in chosen else 0 for i, length in enumerate(lengths)]
