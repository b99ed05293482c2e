"""Computes what answers say from probabilities. docs/decisions.md has these formulas."""

from __future__ import annotations

from collections.abc import Sequence


def best(probabilities: Sequence[float]) -> int:
    """Returns the index of the most likely option; the first of several."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)


def confidence(probabilities: Sequence[float]) -> float:
    """Returns (K * max p - 1) / (K - 1) for K options: the distance of the most likely one from the mean of the others.
    It is 0 if all are equally likely, and 1 if one is certain."""
    count = len(probabilities)
    return min(1.0, max(0.0, (count * max(probabilities) - 1) / (count - 1)))


def score(probabilities: Sequence[float]) -> float:
    """Returns the expected index of the level, from 0 on."""
    return sum(index * probability for index, probability in enumerate(probabilities))
