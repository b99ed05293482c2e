"""The rule of speculative decoding, on devices whose steps cost what was published for Macs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mlxpaged.scheduler.draft_budget import (
    LENGTHS,
    LONG_MATCH,
    MOST_DRAFTS,
    PRIORS,
    PROBE_TOKENS,
    Acceptance,
    draft_lengths,
)

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


def simulate(seconds: Seconds, batch: int, rate: float, fixed: int | None = None, steps: int = 300) -> float:
    """Tokens per second of sequences whose drafts are accepted with this rate. fixed: drafts of each row; None: as the
    rule decides."""
    rng = random.Random(1)
    shared = list(PRIORS)
    sequences = [Acceptance(shared) for _ in range(batch)]
    tokens, took = 0, 0.0
    for _ in range(steps):
        contexts = [100] * batch
        lengths = [fixed or 0] * batch
        if fixed is None:
            lengths = draft_lengths(contexts, [each.chances(4, MOST_DRAFTS) for each in sequences], seconds)
            probed = next((i for i in range(batch) if not lengths[i] and sequences[i].is_probe_due), None)
            if probed is not None:
                lengths[probed] = min(1, draft_lengths(contexts, [[1.0]] * batch, seconds)[probed])
        took += seconds(batch + sum(lengths), 100 * (batch + sum(lengths)))
        for acceptance, length in zip(sequences, lengths, strict=True):
            accepted = next((i for i in range(length) if rng.random() >= rate), length)
            acceptance.observe(4, length, accepted)
            tokens += accepted + 1
    return tokens / took


@pytest.mark.parametrize("batch", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_the_rule_is_near_the_best_fixed_choice_and_not_below_plain(device: str, batch: int) -> None:
    for rate in (0.1, 0.4, 0.8, 0.95):
        found = simulate(DEVICES[device], batch, rate, steps=300)
        fixed = {length: simulate(DEVICES[device], batch, rate, length, steps=300) for length in (0, *LENGTHS)}
        assert found >= 0.97 * fixed[0], rate
        assert found >= 0.9 * max(fixed.values()), (rate, fixed)


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


def test_keys_cost_too() -> None:
    chances = [[0.9, 0.81]]
    assert draft_lengths([100], chances, lambda rows, keys: 1 + 0.0001 * keys) == [2]
    assert draft_lengths([100_000], chances, lambda rows, keys: 1 + 0.0001 * keys) == [0]


def test_nothing_is_verified_before_a_step_was_timed() -> None:
    assert draft_lengths([100], [[1.0]], lambda rows, keys: 0.0) == [0]


def test_chances_follow_what_was_accepted() -> None:
    acceptance = Acceptance(list(PRIORS))
    assert acceptance.chances(4, 2) == [0.5, 0.25]
    assert acceptance.chances(LONG_MATCH, 2) == [0.75, 0.5625]
    for _ in range(50):
        acceptance.observe(4, 3, 1)
    first, second, third = acceptance.chances(4, 3)
    assert first > 0.9
    assert second < 0.2
    assert third == pytest.approx(second * second / first), (
        "nothing is known of the third: it is as likely as the second"
    )
    assert acceptance.chances(LONG_MATCH, 1) == [0.75]


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
