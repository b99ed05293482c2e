"""A step in flight: whose logits are sampled from, and what is read of it at its end."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.sampler import Samples
from mlxpaged.core.engine.step_input import NO_TOKENS
from mlxpaged.core.step import Row, Step


def decoding(sequence_id: int, num_sampled: int = 1) -> Row:
    tokens = [5] * num_sampled
    return Row(sequence_id, 3, tokens, range(3, 3 + num_sampled), num_sampled=num_sampled)


def in_flight(*rows: Row, logits: list[float]) -> InFlightStep:
    """logits: the largest of each row."""
    return InFlightStep(Step(rows), 0.0, mx.array(logits)[:, None] * mx.array([1.0, 0.5]))


def sampled(step: InFlightStep, tokens: dict[int, list[int]]) -> InFlightStep:
    ids = [sequence_id for sequence_id, found in tokens.items() for _ in found]
    step.set_samples(ids, Samples(mx.array([token for found in tokens.values() for token in found])))
    return step


def tokens_of(step: InFlightStep) -> dict[int, list[int]]:
    return {sequence_id: [token.token_id for token in found] for sequence_id, found in step.read().tokens.items()}


def test_tokens_are_read_by_sequence_drafts_in_order() -> None:
    step = in_flight(decoding(1), decoding(2, num_sampled=3), logits=[1, 1, 1, 1])
    sampled(step, {1: [10], 2: [20, 21, 22]})
    assert tokens_of(step) == {1: [10], 2: [20, 21, 22]}
    assert step.read().invalid == set()


def test_what_was_sampled_for_a_sequence_that_has_ended_is_dropped() -> None:
    step = sampled(in_flight(decoding(1), decoding(2), logits=[1, 1]), {1: [10], 2: [20]})
    step.rows = [row for row in step.rows if row.sequence_id == 2]
    assert tokens_of(step) == {2: [20]}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sequences_whose_logits_are_not_finite_are_named(bad: float) -> None:
    step = sampled(in_flight(decoding(1), decoding(2), logits=[1, bad]), {1: [10], 2: [20]})
    assert step.read().invalid == {2}


def test_a_step_that_samples_nothing_still_reads_its_last_row() -> None:
    step = in_flight(Row(7, 0, [1, 2]), Row(8, 0, [1, 2]), logits=[math.nan])
    step.set_samples([], None)
    assert step.is_sampled
    assert step.tokens is NO_TOKENS
    assert step.read() == ({}, {8}, {})


def test_the_next_forward_pass_gets_the_tokens_on_the_device() -> None:
    step = in_flight(decoding(1), decoding(2), logits=[1, 1])
    assert not step.is_sampled
    assert step.tokens is NO_TOKENS
    sampled(step, {1: [10], 2: [20]})
    tokens, ids = step.tokens
    assert tokens is not None
    assert (tokens.tolist(), list(ids)) == ([10, 20], [1, 2])
    assert step.logits is None, "the sampler has them"


def test_only_rows_that_still_run_are_sampled_from() -> None:
    step = in_flight(decoding(1), decoding(2, num_sampled=2), decoding(3), logits=[1, 2, 3, 4])
    assert step.logits_of([1, 2, 2, 3])[:, 0].tolist() == [1, 2, 3, 4]
    assert step.logits_of([2, 2])[:, 0].tolist() == [2, 3]
    assert step.logits_of([1, 3])[:, 0].tolist() == [1, 4]
