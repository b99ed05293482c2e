"""The table of the times of steps without prompts by their rows."""

from __future__ import annotations

from collections.abc import Sequence as ListOf

import pytest

from mlxpaged.core.scheduling.row_table import RowTimes
from mlxpaged.core.scheduling.step_cost import Costs, StepCost
from tests.scheduler.machines import (
    QUANTIZED,
    SLOW_CPU,
    rows_of_a_gpu,
    with_streams,
)
from tests.scheduler.simulation import sequence


def seeded(rows: ListOf[int] = (1, 2, 4, 8, 16, 32, 33, 64)) -> StepCost:
    return StepCost(QUANTIZED, {count: rows_of_a_gpu(count) for count in rows})


def teach_prompts(model: StepCost) -> Costs:
    for tokens in (100, 300, 200, 500):
        model.observe([], [(0, tokens)], rows_of_a_gpu(tokens))
    costs = model.costs()
    assert costs is not None
    return costs


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 20, 32, 33, 50, 64])
def test_steps_that_were_timed_at_the_start_tell_what_others_take_by_their_rows(rows: int) -> None:
    """Between 8 and 32 rows and between 33 and 64 it is the same, and of 3 rows it is interpolated."""
    costs = teach_prompts(seeded())
    assert costs.step_seconds([1] * rows) == pytest.approx(rows_of_a_gpu(rows))


def test_real_steps_keep_the_table_up_and_slow_ones_among_them_change_nothing() -> None:
    model = seeded()
    teach_prompts(model)
    for seconds in (0.03, 0.03, 0.09, 0.03, 0.1, 0.03, 0.03):
        model.observe([1] * 4, [], seconds)
    costs = model.costs()
    assert costs is not None
    assert costs.step_seconds([1] * 4) == pytest.approx(0.03)
    assert costs.step_seconds([1] * 16) == pytest.approx(0.045), "other rows are as much faster"


def test_other_rows_are_as_much_slower_as_the_latest_steps() -> None:
    """A device that is throttled, or a machine that others use: what was timed at the start is not what a step takes
    now."""
    model = seeded()
    for _ in range(8):
        model.observe([1] * 4, [], 2 * rows_of_a_gpu(4))
    assert model.row_seconds() == pytest.approx({rows: 2 * rows_of_a_gpu(rows) for rows in (1, 2, 4, 8, 16, 32, 64)})
    for _ in range(8):
        model.observe([1] * 16, [], rows_of_a_gpu(16))
    assert model.row_seconds() == pytest.approx({rows: rows_of_a_gpu(rows) for rows in (1, 2, 4, 8, 16, 32, 64)})


def test_more_rows_take_at_least_as_long() -> None:
    """Numbers of rows that seem faster than fewer rows have the mean of all steps of both."""
    model = StepCost(decoding={1: 0.01, 2: 0.02, 4: 0.04, 8: 0.03, 16: 0.03})
    assert model.row_seconds() == pytest.approx({1: 0.01, 2: 0.02, 4: 0.1 / 3, 8: 0.1 / 3, 16: 0.1 / 3})
    costs = model.decoding_costs()
    assert costs is not None
    assert costs.decode_seconds(12, 12) == pytest.approx(0.1 / 3)


def test_steps_of_many_keys_that_were_fast_take_some_time() -> None:
    """What a key takes is an estimate, and may be more than a step has taken."""
    times = RowTimes({1: 0.01})
    times.learn_keys(1e-5)
    for _ in range(8):
        times.observe(1, 100_000, 0.02)
    assert min(times.table().seconds) > 0


def test_the_keys_of_longer_contexts_count_beside_the_table() -> None:
    model = seeded()
    for length in range(2, 40):
        model.observe([100 * length] * 4, [], 0.04 + 4e-5 * length)
    costs = teach_prompts(model)
    assert costs.step_seconds([8000] * 4) == pytest.approx(0.04 + 32e-4, rel=0.02)


def test_a_prompt_beside_streams_is_not_estimated_by_their_table() -> None:
    """A step with prompts computes whole tiles, whatever its decoding rows take alone."""
    model = seeded()
    teach_prompts(model)
    for rows, tokens in ((1, 31), (4, 28), (1, 63), (4, 60), (2, 94), (6, 26)) * 3:
        model.observe([1] * rows, [(0, tokens)], rows_of_a_gpu(rows + tokens))
    costs = model.costs()
    assert costs is not None
    for rows, tokens in ((4, 28), (4, 40), (4, 124)):
        assert costs.step_seconds([1] * rows, [(0, tokens)]) == pytest.approx(rows_of_a_gpu(rows + tokens), rel=0.05)


def test_a_chunk_fills_its_time_whatever_decoding_rows_take_without_prompts() -> None:
    timed = with_streams(SLOW_CPU, timed_rows={9: 0.39}, max_step_seconds=0.4)
    timed.add(sequence(200, 20, max_tokens=100), sequence(201, 6000, max_tokens=1))
    timed.step()
    seconds = timed.step()
    assert len(timed.last.rows) == 10
    assert 0.35 <= seconds <= 0.4


def test_the_table_lists_the_median_of_each_number_of_rows() -> None:
    model = seeded((1, 5, 8, 33))
    for seconds in (0.05, 0.02, 0.9, 0.05):
        model.observe([1000] * 5, [], seconds)
    assert model.row_seconds() == pytest.approx({1: 0.01, 5: 0.05, 8: 0.06, 64: 0.12})
