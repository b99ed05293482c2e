"""Prompts beside streams on devices whose steps take as long as published: benchmarks/prompts.py prints the figures."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.prompts import CPU, M1, M3_MAX, M4_MAX, Device, flood, one_prompt
from mlxpaged.core.scheduling.config import MOST_MULTIPLE, READING_SECONDS, step_multiple
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_a_prompt_beside_streams_takes_at_most_one_and_a_half_times_its_time_alone(streams: int) -> None:
    """On an M3 Max. With chunks of 32 tokens, the step beside one stream has 33 rows and computes two tiles."""
    found = one_prompt(M3_MAX, streams)
    assert found.seconds <= 1.5 * found.alone
    assert found.mean <= 1.05 * step_multiple(1) * found.plain, "half of the time is the streams'"
    assert found.seconds <= 0.95 * one_prompt(M3_MAX, streams, tiles=ANY_ROWS).seconds


@pytest.mark.parametrize("device", [M1, M4_MAX, CPU], ids=lambda device: device.name)
def test_in_a_flood_no_stream_stops_and_prompts_get_most_of_the_time(device: Device) -> None:
    found = flood(device)
    limits = [max(MOST_MULTIPLE * step.plain, READING_SECONDS) for step in found.steps]
    assert all(step.streams >= 8 for step in found.steps), "each step has a token for each stream"
    assert found.mean <= 1.02 * statistics.mean(limits)
    assert all(step.seconds <= 1.35 * limit for step, limit in zip(found.steps, limits, strict=True))
    assert found.share >= 0.5
