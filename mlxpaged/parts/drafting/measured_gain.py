"""What steps with drafts have taken and brought, beside what was expected of them.

The rule chooses the best of many estimates, and of these it is often one that is wrong. So it hears by how much.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxpaged.core.scheduling.step_cost import OUTLIER

LATEST = 0.02
"""What the latest step counts in an average. By the simulation of tests/scheduler/test_draft_budget.py, if it is twice
as much, chance ends drafts that pay."""

FORGOTTEN = 0.001
"""What is forgotten in each step without drafts, so that they are tried again. Drafts that are expected to make steps
1.15 times as fast and make them 0.9 times as fast run in less than one step of twenty then."""

START = 2.0
"""The averages begin as if so many drafts had been expected in each step and accepted."""


class Measured(NamedTuple):
    """How many times as many drafts as expected were accepted, and how many times as long as expected steps with drafts
    took beside those without."""

    accepted: float = 1.0
    seconds: float = 1.0


AS_EXPECTED = Measured()


class MeasuredGain:
    """Averages of the latest steps that only decoded."""

    def __init__(self) -> None:
        self._accepted = self._expected = START
        self._with_drafts = self.pace = 1.0
        """What steps with and without drafts have taken, as multiples of what was expected. A machine that others use
        takes longer for both."""

    @property
    def measured(self) -> Measured:
        """Never better than expected: what is better is learned of each sequence and of the times."""
        return Measured(min(1.0, self._accepted / self._expected), max(1.0, self._with_drafts / self.pace))

    def count(self, accepted: float, expected: float) -> None:
        """So many drafts of a step were accepted, and so many were expected to be."""
        self._accepted += LATEST * (accepted - self._accepted)
        self._expected += LATEST * (expected - self._expected)

    def note(self, has_drafts: bool, seconds: float, expected: float) -> None:
        """A step has taken so long, and was expected to take so long."""
        ratio = min(seconds / expected, OUTLIER)
        if has_drafts:
            self._with_drafts += LATEST * (ratio - self._with_drafts)
            return
        self.pace += LATEST * (ratio - self.pace)
        self._with_drafts += FORGOTTEN * (self.pace - self._with_drafts)
        self._accepted += FORGOTTEN * (self._expected - self._accepted)
