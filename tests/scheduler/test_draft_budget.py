"""The rule of speculative decoding, on devices whose steps cost what was published for Macs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from mlxpaged.scheduler.draft_budget import (
    CLEAR_GAIN,
    LENGTHS,
    MATCHES,
    MOST_DRAFTS,
    MOST_LEAD,
    MOST_LOSS,
    PRIORS,
    PROBE_TOKENS,
    TIME_AGAIN,
    Acceptance,
    ProbeBudget,
    draft_lengths,
    gain_of,
)
from mlxpaged.scheduler.row_tiles import ANY_ROWS, RowTiles
from mlxpaged.scheduler.step_cost import StepCost

Seconds = Callable[[int, int], float]


def linear(first: float, more: float) -> Seconds:
    return lambda rows, keys: first + more * (rows - 1)


def in_tiles(rows: int, keys: int) -> float:
    """A 4-bit matrix on an M4 Pro: each row costs until tiles of 32 rows are cheaper (ml-explore/mlx issues 3852 and
    3863)."""
    return min(1 + 0.55 * (rows - 1), 3.6 * -(-rows // 32))


DEVICES: dict[str, Seconds] = {
    "M1": linear(1.0, 0.8),  # weights are read once for each row
    "M3 Ultra": linear(1.0, 0.17),
    "M4 Pro": in_tiles,
    "M5 Max": linear(1.0, 0.03),
}
TILES = {"M4 Pro": RowTiles(32, 32)}


class Simulation:
    """Sequences that decode in a batch. In a share `found` of its steps each has drafts, which are accepted with this
    rate. After `length` steps the next one takes its place.

    fixed: drafts of each row; None: as the rule decides. By a known time of steps if noise is 0. Otherwise the steps
    are timed, with this deviation, while the device becomes slower and faster, after they took 0.6 times as long at the
    start, when the shortest of some was taken.
    """

    def __init__(
        self,
        device: str,
        batch: int,
        rate: float,
        fixed: int | None = None,
        found: float = 1.0,
        noise: float = 0.0,
        length: int = 120,
    ) -> None:
        self._true, self._batch, self._rate, self._fixed, self._found = DEVICES[device], batch, rate, fixed, found
        self._rng, self._noise, self._deviation, self._pace = random.Random(1), random.Random(2), noise, 0.0
        self._shared = list(PRIORS)
        self._sequences = [Acceptance(self._shared) for _ in range(batch)]
        self._length, self._left = length, [length - length * number // batch for number in range(batch)]
        self._with_drafts, self._probes = 0, ProbeBudget()
        rows = (1, 2, 3, 4, 6, 8, 12, 16, 32, 33, 64, 128)
        self._cost = StepCost(TILES.get(device, ANY_ROWS), {each: 0.6 * self._timed(each, noise / 2) for each in rows})

    def _timed(self, rows: int, deviation: float) -> float:
        return self._true(rows, 100 * rows) * math.exp(self._pace + deviation * self._noise.gauss(0, 1))

    def run(self, steps: int) -> float:
        """Tokens per second, by what steps would take without the noise."""
        tokens, took = 0, 0.0
        for _ in range(steps):
            lengths = [self._fixed or 0] * self._batch
            seconds = self._true
            if self._fixed is None:
                if self._deviation:
                    costs = self._cost.decoding_costs()
                    assert costs is not None
                    seconds = costs.decode_seconds
                lengths = self._decide(seconds)
            tokens += sum(map(self._accept, range(self._batch), lengths))
            rows = self._batch + sum(lengths)
            took += self._true(rows, 100 * rows)
            self._pace = 0.98 * self._pace + self._deviation / 5 * self._noise.gauss(0, 1)
            timed = self._timed(rows, self._deviation)
            if any(lengths) and self._fixed is None:
                plain = seconds(self._batch, 100 * self._batch)
                for each, length in zip(self._sequences, lengths, strict=True):
                    each.wait(timed / plain - 1 - sum(each.chances(4, length)))
            self._probes.save()
            self._with_drafts = self._with_drafts + 1 if any(lengths) else 0
            self._cost.observe([100] * rows, [], timed)
        return tokens / took

    def _decide(self, seconds: Seconds) -> list[int]:
        """As `Drafting.choose`."""
        drafts = [MOST_DRAFTS if self._rng.random() < self._found else 0 for _ in self._sequences]
        contexts, leads = [100] * self._batch, [each.lead for each in self._sequences]
        chances = [each.chances(4, count) for each, count in zip(self._sequences, drafts, strict=True)]
        lengths = draft_lengths(contexts, chances, seconds, leads=leads)
        for i, each in enumerate(self._sequences):
            if drafts[i] and not lengths[i] and each.is_probe_due:
                hopeful = [[1.0] * min(1, count) for count in drafts]
                length = min(1, draft_lengths(contexts, hopeful, seconds, leads=leads)[i])
                if length and self._probes.spend(contexts, i, seconds):
                    lengths[i] = length
                break
        is_plain_due = self._with_drafts >= TIME_AGAIN and gain_of(lengths, contexts, chances, seconds) < CLEAR_GAIN
        return [0] * self._batch if is_plain_due else lengths

    def _accept(self, i: int, length: int) -> int:
        """Returns the tokens of a sequence's step."""
        accepted = next((draft for draft in range(length) if self._rng.random() >= self._rate), length)
        self._sequences[i].observe(4, length, accepted)
        self._left[i] -= 1
        if self._left[i] == 0:
            self._left[i], self._sequences[i] = self._length, Acceptance(self._shared)
        return accepted + 1


@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.rotated("slow")
def test_the_rule_is_near_the_best_fixed_choice_and_not_below_plain(device: str, batch: int) -> None:
    for rate in (0.1, 0.4, 0.8, 0.95):
        found = Simulation(device, batch, rate, length=300).run(300)
        fixed = {count: Simulation(device, batch, rate, count, length=300).run(300) for count in (0, *LENGTHS)}
        assert found >= 0.97 * fixed[0], rate
        assert found >= 0.9 * max(fixed.values()), (rate, fixed)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_the_rule_is_not_below_plain_where_times_are_noisy_and_change(device: str, batch: int) -> None:
    """Of many estimates, the best is the one that is wrong most."""
    for found, rate, noise in ((0.3, 0.3, 0.1), (0.3, 0.6, 0.1), (1.0, 0.3, 0.1), (1.0, 0.6, 0.05)):
        plain = batch / DEVICES[device](batch, 100 * batch)
        assert Simulation(device, batch, rate, None, found, noise).run(250) >= 0.97 * plain, (found, rate, noise)


def test_an_m1_verifies_nothing() -> None:
    assert draft_lengths([100], [[0.8, 0.64]], DEVICES["M1"]) == [0]


def test_what_drafts_cost_before_the_step_counts() -> None:
    """The drafts of a head take a share of a step each, those of all sequences together; and the device may wait."""
    chances = [[0.8, 0.64, 0.51, 0.41]] * 2
    costs = linear(1.0, 0.03)
    assert draft_lengths([100, 100], chances, costs) == [4, 4]
    assert draft_lengths([100, 100], chances, costs, [0.1, 0.1]) == [4, 4]
    assert draft_lengths([100, 100], chances, costs, [0.3, 0.3]) == [2, 2]
    assert draft_lengths([100, 100], chances, costs, [0.9, 0.9]) == [0, 0]
    assert draft_lengths([100, 100], chances, costs, [0.9, 0.0]) == [0, 4], "drafts from the text cost nothing"
    assert draft_lengths([100], chances[:1], costs, exposed=0.5) == [4]
    assert draft_lengths([100], [[0.3]], costs, exposed=0.2) == [1]
    assert draft_lengths([100], [[0.3]], costs, exposed=0.25) == [0]


def test_rows_that_cost_nothing_are_filled() -> None:
    assert draft_lengths([100, 100], [[0.5] * 8, [0.1] * 3], lambda rows, keys: 1.0) == [8, 2]


def test_the_step_of_others_is_not_made_much_longer() -> None:
    """Alone, all eight drafts are worth it."""
    chances = [0.99**i for i in range(1, 9)]
    assert draft_lengths([100], [chances], linear(1.0, 0.17)) == [8]
    assert draft_lengths([100, 100], [chances, []], linear(1.0, 0.17)) == [2, 0]


def test_a_request_waits_for_the_drafts_of_others_as_long_as_it_is_ahead() -> None:
    chances, costs = [[0.9, 0.81], []], linear(1.0, 0.05)
    assert draft_lengths([100, 100], chances, costs) == [2, 0]
    assert draft_lengths([100, 100], chances, costs, leads=[0.0, 0.11]) == [2, 0]
    assert draft_lengths([100, 100], chances, costs, leads=[0.0, 0.09]) == [1, 0]
    assert draft_lengths([100, 100], chances, costs, leads=[9.0, 0.0]) == [0, 0]
    assert draft_lengths([100, 100], [*chances[:1], [0.9, 0.81]], costs, leads=[-2.0, -2.0]) == [2, 2]


def test_a_request_is_ahead_by_likely_drafts_and_behind_by_longer_steps() -> None:
    acceptance = Acceptance(list(PRIORS))
    start = acceptance.lead
    acceptance.observe(4, 2, 1)
    acceptance.wait(0.3 - 1.1)
    assert acceptance.lead == pytest.approx(start + 1.1 + MOST_LOSS - 0.3)
    for _ in range(100):
        acceptance.observe(0, 0, 0)
        acceptance.wait(MOST_LOSS)
    assert acceptance.lead == pytest.approx(start + 1.1 + MOST_LOSS - 0.3), "a loss of so much is allowed"
    acceptance.wait(50)
    assert acceptance.lead == -MOST_LEAD


def test_keys_cost_too() -> None:
    chances = [[0.9, 0.81]]
    assert draft_lengths([100], chances, lambda rows, keys: 1 + 0.0001 * keys) == [2]
    assert draft_lengths([100_000], chances, lambda rows, keys: 1 + 0.0001 * keys) == [0]


def test_nothing_is_verified_before_a_step_was_timed() -> None:
    assert draft_lengths([100], [[1.0]], lambda rows, keys: 0.0) == [0]


def test_chances_follow_what_was_accepted() -> None:
    acceptance = Acceptance(list(PRIORS))
    assert acceptance.chances(4, 2) == [0.5, 0.25]
    assert acceptance.chances(max(MATCHES), 2) == [0.75, 0.5625]
    for _ in range(50):
        acceptance.observe(4, 3, 1)
    first, second, third = acceptance.chances(4, 3)
    assert first > 0.9
    assert second < 0.2
    assert third == pytest.approx(second * second / first), (
        "nothing is known of the third: it is as likely as the second"
    )
    assert acceptance.chances(max(MATCHES), 1) == [0.75]


def test_probes_become_rarer_while_they_fail() -> None:
    acceptance = Acceptance(list(PRIORS))
    due = []
    for token in range(400):
        if acceptance.is_probe_due:
            due.append(token)
            acceptance.observe(4, 1, 0)
        else:
            acceptance.observe(0, 0, 0)
    assert due == [PROBE_TOKENS, 3 * PROBE_TOKENS + 1, 7 * PROBE_TOKENS + 2]
