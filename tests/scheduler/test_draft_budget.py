"""The rule of speculative decoding, on devices whose steps cost what was published for Macs."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles
from mlxpaged.core.scheduling.step_cost import StepCost
from mlxpaged.parts.drafting import draft_budget
from mlxpaged.parts.drafting.acceptance import (
    BY_NETWORK,
    MATCHES,
    MOST_DRAFTS,
    MOST_LEAD,
    MOST_LOSS,
    PRIORS,
    PROBE_TOKENS,
    Acceptance,
    StepCounts,
)
from mlxpaged.parts.drafting.draft_budget import LENGTHS, DraftBudget, Seconds, draft_lengths


@pytest.fixture(autouse=True)
def _drafts_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server."""
    monkeypatch.setattr(draft_budget, "draft_lengths", draft_lengths)


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


SEEDS = 4


class Simulation:
    """Sequences that decode in a batch. In a share `found` of its steps each has drafts, which are accepted with this
    rate. After `length` steps the next one takes its place. The first `silent` of the batch never have any.

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
        silent: int = 0,
        seed: int = 1,
    ) -> None:
        self._true, self._batch, self._rate, self._fixed, self._found = DEVICES[device], batch, rate, fixed, found
        self._rng, self._noise, self._deviation, self._pace = random.Random(seed), random.Random(2), noise, 0.0
        self._length, self._left = length, [length - length * number // batch for number in range(batch)]
        self._silent, self._ids = silent, list(range(batch))
        self._since = [(0.0, 0)] * batch
        rows = (1, 2, 3, 4, 6, 8, 12, 16, 32, 33, 64, 128)
        self._cost = StepCost(TILES.get(device, ANY_ROWS), {each: 0.6 * self._timed(each, noise / 2) for each in rows})
        self._budget = DraftBudget(self._seconds)
        self.num_searched = 0
        self.most_behind = 0.0
        """The longest that a sequence has taken beyond its tokens and the loss that is allowed, in steps without
        drafts."""

    def _seconds(self) -> Seconds | None:
        costs = self._cost.decoding_costs() if self._deviation else None
        return self._true if costs is None else costs.decode_seconds

    def _timed(self, rows: int, deviation: float) -> float:
        return self._true(rows, 100 * rows) * math.exp(self._pace + deviation * self._noise.gauss(0, 1))

    def run(self, steps: int) -> float:
        """Tokens per second, by what steps would take without the noise."""
        tokens, took = 0, 0.0
        plain = self._true(self._batch, 100 * self._batch)
        for _ in range(steps):
            lengths = self._choose() if self._fixed is None else [self._fixed] * self._batch
            accepted = {each: self._accept(i, lengths[i]) for i, each in enumerate(self._ids) if lengths[i]}
            rows = self._batch + sum(lengths)
            took += self._true(rows, 100 * rows)
            tokens += self._batch + sum(accepted.values())
            self._pace = 0.98 * self._pace + self._deviation / 5 * self._noise.gauss(0, 1)
            timed = self._timed(rows, self._deviation)
            self._budget.count_step(accepted, {each: lengths[i] for i, each in enumerate(self._ids) if lengths[i]})
            for i, each in enumerate(self._ids):
                if lengths[i]:
                    self._budget.of(each).observe(4, lengths[i], accepted[each])
            self._budget.note_step(self._batch, 100 * self._batch, (sum(lengths), 100 * sum(lengths)), timed)
            self._cost.observe([100] * rows, [], timed)
            for i, each in enumerate(self._ids):
                self._end_step(i, accepted.get(each, 0) + 1, took / plain)
        return tokens / took

    def _choose(self) -> list[int]:
        drafts = [MOST_DRAFTS if self._rng.random() < self._found else 0 for _ in self._ids]
        drafts[: self._silent] = [0] * self._silent
        searched = [each for each in self._ids if self._budget.searches(each)]
        drafts = [count if each in searched else 0 for each, count in zip(self._ids, drafts, strict=True)]
        self.num_searched += len(searched)
        chances = [self._budget.of(each).chances(4, count) for each, count in zip(self._ids, drafts, strict=True)]
        return self._budget.choose(self._ids, [100] * self._batch, chances, [0.0] * self._batch, searched)

    def _accept(self, i: int, length: int) -> int:
        return next((draft for draft in range(length) if self._rng.random() >= self._rate), length)

    def _end_step(self, i: int, tokens: int, now: float) -> None:
        began, before = self._since[i]
        self._since[i] = began, before + tokens
        self._left[i] -= 1
        if self._left[i] == 0:
            self.most_behind = max(self.most_behind, now - began - (1 + MOST_LOSS) * (before + tokens))
            self._budget.forget(self._ids[i])
            self._left[i], self._ids[i], self._since[i] = self._length, self._ids[i] + self._batch, (now, 0)


@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.rotated("slow")
def test_the_rule_is_near_the_best_fixed_choice_and_not_below_plain(device: str, batch: int) -> None:
    """From the first step on, when nothing is known of the drafts. Means of several runs, because chance decides what
    is learned first."""
    for rate in (0.1, 0.4, 0.8, 0.95):

        def mean(fixed: int | None, rate: float = rate) -> float:
            runs = (Simulation(device, batch, rate, fixed, length=300, seed=seed) for seed in range(SEEDS))
            return statistics.mean(simulation.run(300) for simulation in runs)

        found, fixed = mean(None), {count: mean(count) for count in (0, *LENGTHS)}
        assert found >= 0.97 * fixed[0], rate
        assert found >= 0.85 * max(fixed.values()), (rate, fixed)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_the_rule_is_not_below_plain_where_times_are_noisy_and_change(device: str, batch: int) -> None:
    """Of many estimates, the best is the one that is wrong most."""
    for found, rate, noise in ((0.3, 0.3, 0.1), (0.3, 0.6, 0.1), (1.0, 0.3, 0.1), (1.0, 0.6, 0.05)):
        plain = batch / DEVICES[device](batch, 100 * batch)
        assert Simulation(device, batch, rate, None, found, noise).run(250) >= 0.97 * plain, (found, rate, noise)


@pytest.mark.parametrize("silent", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_a_request_loses_no_more_to_drafts_than_a_share_and_four_steps(device: str, silent: int) -> None:
    for found, rate in ((0.3, 0.6), (1.0, 0.9)):
        simulation = Simulation(device, 8, rate, found=found, silent=silent)
        simulation.run(500)
        assert simulation.most_behind <= 4.05, (found, rate)


def test_drafts_that_bring_little_are_searched_for_in_every_fourth_step() -> None:
    simulation = Simulation("M1", 8, 0.3)
    simulation.run(400)
    assert 800 <= simulation.num_searched < 1400
    simulation = Simulation("M5 Max", 8, 0.7)
    simulation.run(400)
    assert simulation.num_searched > 2400


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
    assert draft_lengths([100], [[0.6]], costs, exposed=0.5) == [1]
    assert draft_lengths([100], [[0.6]], costs, exposed=0.55) == [0]


def test_rows_that_cost_nothing_are_filled() -> None:
    assert draft_lengths([100, 100], [[0.5] * 8, [0.1] * 3], lambda rows, keys: 1.0) == [8, 2]


def test_a_stream_waits_at_most_a_fifth_longer_for_the_tokens_that_it_is_expected_to_get() -> None:
    chances = [0.99**i for i in range(1, 9)]
    dear = linear(1.0, 0.17)
    assert draft_lengths([100], [chances], dear) == [8], "alone, all eight are worth it"
    assert draft_lengths([100, 100], [chances, chances], dear) == [8, 8]
    assert draft_lengths([100, 100], [chances, []], dear) == [1, 0]
    assert draft_lengths([100, 100], [chances, [0.1]], dear) == [1, 0]
    assert draft_lengths([100, 100], [chances, [0.6]], dear) == [4, 1], "its own draft counts"


def test_where_one_stream_may_not_wait_for_many_drafts_of_others_all_have_a_few() -> None:
    """Most of the others' drafts are more likely than its first one."""
    chances = [[0.95**i for i in range(1, 9)]] * 3 + [[0.6]]
    assert draft_lengths([100] * 4, chances, linear(1.0, 0.3)) == [1, 1, 1, 1]


def test_no_stream_falls_behind_by_more_than_four_steps() -> None:
    chances, costs = [[0.9, 0.81], []], linear(1.0, 0.05)
    for lead, expected in ((4.0, [2, 0]), (0.0, [2, 0]), (-3.9, [2, 0]), (-3.95, [1, 0]), (-4.0, [0, 0])):
        assert draft_lengths([100, 100], chances, costs, leads=[0.0, lead]) == expected, lead
    assert draft_lengths([100, 100], [[0.9, 0.81]] * 2, costs, leads=[-4.0, -4.0]) == [2, 2], "its own drafts count"


def test_prompts_lose_a_twentieth_of_a_step_to_drafts() -> None:
    """A step with prompts is longer, so drafts cost less of it, but others wait for their first token."""
    chances = [[0.99**i for i in range(1, 9)]]
    assert draft_lengths([100], chances, linear(1.0, 0.1)) == [8]
    assert draft_lengths([100], chances, linear(1.0, 0.1), prompts=1.0) == [1]
    assert draft_lengths([100], chances, linear(1.0, 0.1), prompts=3.0) == [2]
    assert draft_lengths([100], chances, linear(1.0, 0.2), prompts=1.0) == [0]
    assert draft_lengths([100], chances, linear(1.0, 0.05), exposed=0.2, prompts=3.0) == [0], "nor to waiting"


def test_free_rows_of_a_tile_are_not_free_beside_a_prompt() -> None:
    """Its tokens would fill them."""
    chances = [[0.99**i for i in range(1, 9)]] * 4
    assert draft_lengths([100] * 4, chances, lambda rows, keys: float(-(-rows // 32))) == [8, 8, 8, 4]
    assert sum(draft_lengths([100] * 4, chances, lambda rows, keys: float(-(-rows // 32)), prompts=3.0)) == 6


def test_a_request_is_ahead_by_accepted_drafts_and_behind_by_longer_steps() -> None:
    budget = DraftBudget(lambda: linear(0.1, 0.01))
    first, second = budget.of(1), budget.of(2)
    budget.count_step({1: 1}, {1: 2})
    first.observe(4, 2, 1)
    budget.note_step(2, 200, (2, 200), 0.13)
    assert first.lead == pytest.approx(1 + MOST_LOSS - 0.2 / 1.1)
    assert second.lead == pytest.approx(MOST_LOSS - 0.2 / 1.1)
    for _ in range(20):
        budget.count_step({}, {})
        budget.note_choice(0.11 * MOST_LOSS)
        budget.note_step(2, 200, (0, 0), 0.11)
        assert budget.choose([1, 2], [100, 100], [[0.0], []], [0.0, 0.0], []) == [0, 0]
    assert second.lead == pytest.approx(MOST_LOSS - 0.2 / 1.1), "a loss of so much is allowed, and no drafts, no loss"
    budget.note_step(2, 200, (2, 200), 50.0)
    assert first.lead == second.lead == -MOST_LEAD


def test_keys_cost_too() -> None:
    chances = [[0.9, 0.81]]
    assert draft_lengths([100], chances, lambda rows, keys: 1 + 0.0001 * keys) == [2]
    assert draft_lengths([100_000], chances, lambda rows, keys: 1 + 0.0001 * keys) == [0]


def test_nothing_is_verified_before_a_step_was_timed() -> None:
    assert draft_lengths([100], [[1.0]], lambda rows, keys: 0.0) == [0]


def test_chances_follow_what_was_accepted() -> None:
    acceptance = Acceptance(list(PRIORS), StepCounts())
    assert acceptance.chances(4, 2) == [0.5, 0.25]
    assert acceptance.chances(max(MATCHES), 2) == [0.75, 0.5625]
    for _ in range(10):
        acceptance.observe(4, 3, 1)
    first, second, third = acceptance.chances(4, 3)
    assert first > 0.8
    assert second < 0.3
    assert third == pytest.approx(second * second / first), (
        "nothing is known of the third: it is as likely as the second"
    )
    assert acceptance.chances(max(MATCHES), 1) == [0.75]
    for _ in range(50):
        acceptance.observe(4, 8, 1)
    assert 2 <= len(acceptance.chances(4, 8)) < 5, "unlikely ones are left out"


def test_a_probe_is_due_after_so_many_tokens_without_drafts() -> None:
    steps = StepCounts()
    acceptance = Acceptance(list(PRIORS), steps)
    due = []
    for token in range(400):
        is_due = acceptance.is_probe_due
        steps.count += 1
        if is_due:
            due.append(token)
            acceptance.observe(4, 1, 0)
    assert due == [PROBE_TOKENS + (PROBE_TOKENS + 1) * number for number in range(12)]


class Misjudged:
    """Four sequences of which each always has a draft, whose chance is thought to be 0.5. If that and the times are
    right, drafts make a step 1.25 times as fast."""

    CHANCE = 0.5

    def __init__(self) -> None:
        self._plain = linear(0.1, 0.007)
        self._budget = DraftBudget(lambda: self._plain)
        self._ids, self._contexts, self._owed = [1, 2, 3, 4], [100] * 4, 0.0

    def run(self, steps: int, rate: float = CHANCE, stretch: float = 1.0, pace: float = 1.0) -> tuple[float, float]:
        """rate: of the drafts that are accepted. stretch: how many times as long as it is thought a step with drafts
        takes. pace: the same for all steps. Returns the share of the steps with drafts, and how many times as many
        tokens as without them they have brought in the same time."""
        with_drafts, tokens, took = 0, 0, 0.0
        for _ in range(steps):
            lengths = self._budget.choose(self._ids, self._contexts, [[self.CHANCE]] * 4, [0.0] * 4, self._ids)
            rows = sum(lengths)
            self._owed += rate * rows
            accepted, self._owed = divmod(self._owed, 1.0)
            seconds = pace * self._plain(4 + rows, 400) * (stretch if rows else 1.0)
            drafted = {each: length for each, length in zip(self._ids, lengths, strict=True) if length}
            count = int(accepted)
            self._budget.count_step({each: int(i < count) for i, each in enumerate(drafted)}, drafted)
            self._budget.note_step(4, 400, (rows, 100 * rows), seconds)
            for i, each in enumerate(drafted):
                self._budget.of(each).observe(BY_NETWORK, 1, int(i < count))
            with_drafts, tokens, took = with_drafts + (rows > 0), tokens + 4 + count, took + seconds
        return with_drafts / steps, tokens / took / (4 / pace / self._plain(4, 400))


@pytest.mark.parametrize(("rate", "stretch"), [(0.0, 1.0), (0.1, 1.0), (0.5, 1.4), (0.3, 1.15)])
def test_drafts_that_bring_less_than_expected_end_until_they_pay_again(rate: float, stretch: float) -> None:
    device = Misjudged()
    share, gain = device.run(400)
    assert share > 0.9
    assert gain > 1.2
    device.run(200, rate, stretch)
    share, gain = device.run(2000, rate, stretch)
    assert 0 < share < 0.1, "they are tried again"
    assert gain > 0.99
    device.run(600)
    share, gain = device.run(400)
    assert share > 0.9
    assert gain > 1.2


def test_a_machine_that_is_slower_for_all_steps_goes_on_with_drafts() -> None:
    device = Misjudged()
    device.run(100)
    device.run(200, pace=1.5)
    share, gain = device.run(200, pace=1.5)
    assert share > 0.9
    assert gain > 1.2
