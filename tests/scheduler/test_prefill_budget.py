"""How many prompt tokens a step computes, on machines whose times are known."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling.config import MOST_MULTIPLE, READING_SECONDS, step_multiple
from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK
from mlxpaged.core.scheduling.step_cost import KEPT, Costs
from tests.scheduler.machines import (
    FAST_GPU,
    MACHINES,
    SLOW_CPU,
    TimedScheduler,
    with_streams,
)
from tests.scheduler.simulation import sequence


def prompt_steps(timed: TimedScheduler, number: int, length: int) -> list[float]:
    """Seconds of every step until the prompt is computed."""
    prompt = sequence(number, length, max_tokens=2)
    timed.add(prompt)
    steps = []
    while prompt.num_output_tokens == 0:
        steps.append(timed.step())
    return steps


@MACHINES
@pytest.mark.parametrize("milliseconds", [120, 400])
def test_a_long_prompt_keeps_to_the_limit_and_uses_it(machine: Costs, milliseconds: int) -> None:
    timed = with_streams(machine, max_step_seconds=milliseconds / 1000)
    steps = prompt_steps(timed, 200, 6000)
    least = machine.step_seconds([500] * 8, [(6000, LEAST_CHUNK)])
    assert max(steps) <= 1.05 * max(milliseconds / 1000, least)
    assert sorted(steps)[len(steps) // 2] >= 0.8 * milliseconds / 1000


@MACHINES
def test_one_prompt_gets_half_of_the_time_of_streams(machine: Costs) -> None:
    """On the GPU, the shortest chunk alone takes three times as long as a step that decodes."""
    timed, multiple = with_streams(machine), step_multiple(1)
    plain = timed.step()
    steps = prompt_steps(timed, 200, 3000)
    longest = machine.chunk_seconds(3000, LEAST_CHUNK)
    assert max(steps) <= max(1.2 * multiple * plain, 1.1 * plain + longest)  # contexts grow
    assert 0.9 * multiple <= sum(steps) / len(steps) / plain <= 1.2 * multiple


@MACHINES
def test_a_flood_of_prompts_leaves_streams_at_reading_pace(machine: Costs) -> None:
    timed = with_streams(machine)
    limit = max(MOST_MULTIPLE * timed.step(), READING_SECONDS)
    timed.add(*(sequence(number, 800 + number, max_tokens=1) for number in range(200, 212)))
    steps = []
    while len(timed.scheduler.waiting) >= MOST_MULTIPLE:
        steps.append(timed.step())
        assert len(timed.last.rows) > 8, "no stream stops, and each step computes a prompt"
    assert max(steps) <= 1.05 * limit + machine.chunk_seconds(800, LEAST_CHUNK)
    assert sum(steps) / len(steps) >= 0.8 * limit


def test_a_prompt_does_not_wait_for_what_an_earlier_one_took() -> None:
    timed = with_streams(FAST_GPU)
    for number in (200, 201):
        timed.add(sequence(number, LEAST_CHUNK, max_tokens=1))
        timed.step()
        assert any(row.num_tokens == LEAST_CHUNK for row in timed.last.rows)
        timed.step()


def test_after_short_prompts_only_a_long_one_is_learned_in_a_few_steps() -> None:
    """Only the last few tokens of cached prompts have been computed so far."""
    timed = TimedScheduler(SLOW_CPU)
    timed.add(*(sequence(number, 2, max_tokens=5000) for number in range(8)))
    for _ in range(KEPT):
        timed.step()
    steps = prompt_steps(timed, 200, 3000)
    limit = step_multiple(1) * SLOW_CPU.step_seconds([80] * 8)
    for part in (steps[1:15], steps):  # the shortest chunk takes longer than the limit: some steps have none
        assert sum(part) / len(part) == pytest.approx(limit, rel=0.2)


def test_chunks_become_shorter_as_their_context_grows() -> None:
    timed = with_streams(SLOW_CPU, max_step_seconds=0.2)
    timed.add(sequence(200, 6000, max_tokens=2))
    chunks = []
    for _ in range(10):
        timed.step()
        chunks.append(max(row.num_tokens for row in timed.last.rows))
    assert chunks[-1] < chunks[0]
    assert chunks == sorted(chunks, reverse=True)


def test_a_prompt_goes_on_however_small_the_limit() -> None:
    timed = with_streams(SLOW_CPU, max_step_seconds=0.001)
    assert len(prompt_steps(timed, 200, 10 * LEAST_CHUNK)) == 10


def test_no_sequence_is_admitted_after_a_prompt_that_was_cut_short() -> None:
    """Its blocks can be shared once they are computed: they must not be computed a second time beside it."""
    timed = with_streams(SLOW_CPU, max_step_seconds=0.2)
    prompt = list(range(10_000, 13_000))
    first, second = sequence(200, prompt, max_tokens=2), sequence(201, prompt, max_tokens=2)
    timed.add(first, second)
    while first.num_output_tokens == 0:
        timed.step()
    while second.num_output_tokens == 0:
        timed.step()
    assert second.num_cached_tokens >= len(prompt) - timed.scheduler.config.block_size


def test_short_prompts_share_a_step_up_to_the_limit() -> None:
    timed = with_streams(SLOW_CPU, max_step_seconds=0.4)
    timed.add(*(sequence(300 + number, 40, max_tokens=2) for number in range(10)))
    seconds = timed.step()
    prompts = [row for row in timed.last.rows if row.num_tokens > 1]
    assert 2 <= len(prompts) < 10
    assert seconds <= 0.4, "none joins without time for its shortest chunk"


def test_while_no_sequence_decodes_a_prompt_has_the_whole_step() -> None:
    timed = with_streams(SLOW_CPU)
    for other in list(timed.scheduler.running):
        timed.scheduler.finish(other.sequence_id, other.finish_reason)  # type: ignore[arg-type]
    assert len(prompt_steps(timed, 200, 6000)) == 1


def test_zero_is_no_limit() -> None:
    timed = with_streams(SLOW_CPU, max_step_seconds=0)
    assert len(prompt_steps(timed, 200, 6000)) == 1
