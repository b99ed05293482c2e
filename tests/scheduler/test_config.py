"""Settings of a scheduler that make no sense."""

from __future__ import annotations

import math

import pytest

from mlxpaged.core.scheduling.config import SchedulerConfig
from tests.scheduler.simulation import make_scheduler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_preference": 1.0}, "decode_preference must be at least 0 and below 1"),
        ({"decode_preference": -0.1}, "decode_preference must be at least 0 and below 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)


def test_a_budget_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(num_blocks=1, max_num_seqs=8, max_num_batched_tokens=7)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="max_step_seconds must be at least 0 and finite"):
        SchedulerConfig(num_blocks=8, max_step_seconds=seconds)
