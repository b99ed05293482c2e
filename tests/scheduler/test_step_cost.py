"""The cost model of a step, and the tiles of its rows."""

from __future__ import annotations

import math
import random
from dataclasses import astuple

import pytest

from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, LEAST_CHUNK, RowTiles
from mlxpaged.core.scheduling.step_cost import EXTRAPOLATION, KEPT, OUTLIER, Costs, StepCost
from tests.scheduler.machines import (
    FAST_GPU,
    MACHINES,
    MIXTURE,
    QUANTIZED,
    SLOW_CPU,
    TimedScheduler,
    rows_of_a_gpu,
)
from tests.scheduler.simulation import sequence


def observe(
    model: StepCost, machine: Costs, contexts: list[int], chunks: list[tuple[int, int]], noise: float = 1.0
) -> None:
    model.observe(contexts, chunks, noise * machine.step_seconds(contexts, chunks))


def taught(machine: Costs, noise: float = 0.0) -> StepCost:
    model, rng = StepCost(), random.Random(0)
    for _ in range(40):
        contexts = [rng.randrange(1, 3000) for _ in range(rng.randrange(17))]
        chunks = [(rng.randrange(4000), rng.randrange(2, 600)) for _ in range(rng.randrange(3))]
        observe(model, machine, contexts, chunks, rng.uniform(1 - noise, 1 + noise))
    return model


@MACHINES
def test_steps_of_all_kinds_teach_what_others_will_take(machine: Costs) -> None:
    costs = taught(machine).costs()
    assert costs is not None
    for contexts, start, tokens in (([500] * 8, 0, 100), ([2000] * 16, 3000, 64), ([], 0, 512), ([10], 4000, 2000)):
        assert costs.step_seconds(contexts, [(start, tokens)]) == pytest.approx(
            machine.step_seconds(contexts, [(start, tokens)]), rel=0.01
        )


@MACHINES
def test_noise_of_a_third_is_averaged_out(machine: Costs) -> None:
    costs = taught(machine, noise=0.33).costs()
    assert costs is not None
    for contexts, start in (([500] * 8, 0), ([1000] * 4, 3000)):
        assert costs.step_seconds(contexts, [(start, 200)]) == pytest.approx(
            machine.step_seconds(contexts, [(start, 200)]), rel=0.25
        )


def test_no_part_is_ever_negative() -> None:
    rng = random.Random(1)
    for _ in range(100):
        model = StepCost()
        for _ in range(rng.randrange(1, 12)):
            chunks = [(rng.randrange(4000), rng.randrange(2, 600)) for _ in range(rng.randrange(1, 3))]
            model.observe([rng.randrange(1, 3000)] * rng.randrange(9), chunks, rng.uniform(1e-9, 2))
        costs = model.costs()
        assert costs is not None
        values = astuple(costs)[:5]
        assert all(value >= 0 and math.isfinite(value) for value in values)
        assert sum(values) > 0


def test_nothing_is_known_of_prompts_before_one_ran() -> None:
    model = StepCost()
    model.observe([10], [], 0.1)
    assert model.costs() is None


def test_one_step_is_enough_for_a_first_guess() -> None:
    model = StepCost()
    observe(model, SLOW_CPU, [], [(0, 100)])
    costs = model.costs()
    assert costs is not None
    assert costs.step_seconds([], [(0, 100)]) == pytest.approx(SLOW_CPU.step_seconds([], [(0, 100)]))


def test_a_clock_that_tells_no_time_teaches_nothing_wrong() -> None:
    model = StepCost()
    model.observe([], [(0, 100)], 0.0)
    costs = model.costs()
    assert costs is not None
    assert costs.chunk_within(0.05, 0, 10_000) == 100 * EXTRAPOLATION


def test_a_few_tokens_do_not_teach_that_a_thousand_cost_nothing() -> None:
    """The step with them happened to be faster than those without."""
    model = StepCost()
    for length in range(KEPT):
        observe(model, SLOW_CPU, [800 + length] * 8, [])
    observe(model, SLOW_CPU, [864] * 8, [(0, 8)], noise=0.9)
    costs = model.costs()
    assert costs is not None
    chunk = max(LEAST_CHUNK, costs.chunk_within(0.1, 0, 10_000))
    assert SLOW_CPU.chunk_seconds(0, chunk) < 0.1


def test_a_step_that_something_else_held_up_counts_a_few_times_only() -> None:
    model = taught(SLOW_CPU)
    before = model.costs()
    assert before is not None
    held_up, usual = ([500] * 8, [(0, 100)]), before.step_seconds([500] * 8, [(0, 100)])
    model.observe(*held_up, 1000 * usual)
    after = model.costs()
    assert after is not None
    assert usual < after.step_seconds(*held_up) < OUTLIER * usual


def test_a_machine_that_became_slower_is_learned_anew() -> None:
    model, slower = taught(FAST_GPU), SLOW_CPU
    rng = random.Random(2)
    for _ in range(10 * KEPT):
        observe(
            model, slower, [rng.randrange(1, 3000)] * rng.randrange(9), [(rng.randrange(4000), rng.randrange(2, 600))]
        )
        observe(model, slower, [rng.randrange(1, 3000)] * rng.randrange(9), [])
        costs = model.costs()
    assert costs is not None
    assert costs.chunk_seconds(1000, 100) == pytest.approx(slower.chunk_seconds(1000, 100), rel=0.05)


def test_a_long_answer_does_not_crowd_out_what_is_known_of_prompts() -> None:
    model = taught(SLOW_CPU)
    for length in range(10_000):
        observe(model, SLOW_CPU, [length], [])
    costs = model.costs()
    assert costs is not None
    assert costs.chunk_seconds(1000, 100) == pytest.approx(SLOW_CPU.chunk_seconds(1000, 100), rel=0.05)


@MACHINES
@pytest.mark.parametrize("start", [0, 100, 30_000])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 3.0])
def test_the_chunk_within_a_time_is_the_longest_that_fits(machine: Costs, start: int, seconds: float) -> None:
    tokens = machine.chunk_within(seconds, start, 10_000)
    assert machine.chunk_seconds(start, tokens) <= seconds * 1.000001
    assert machine.chunk_seconds(start, tokens + 1) > seconds


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_enough_for_no_token(seconds: float) -> None:
    assert SLOW_CPU.chunk_within(seconds, 10, 10_000) == 0


# -- tiles of rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiles", "rows", "tokens", "chunk"),
    [
        (ANY_ROWS, 8, 0, 24),
        (ANY_ROWS, 8, 100, 100),
        (QUANTIZED, 1, 0, 31),
        (QUANTIZED, 8, 0, 24),
        (QUANTIZED, 9, 0, 55),
        (QUANTIZED, 1, 100, 95),
        (QUANTIZED, 0, 70, 64),
        (MIXTURE, 1, 31, 127),
        (MIXTURE, 4, 300, 284),
    ],
)
def test_a_chunk_that_is_cut_fills_its_last_tile(tiles: RowTiles, rows: int, tokens: int, chunk: int) -> None:
    assert tiles.chunk(rows, tokens) == chunk
    assert tiles.padded(rows + chunk) == rows + chunk


def test_a_chunk_that_fits_into_the_tile_of_the_decoding_rows_is_learned_from() -> None:
    """As with 16 streams that have 24 drafts, and a prompt that ends."""
    cost = StepCost(RowTiles(32))
    cost.observe([100] * 40, [(300, 8)], 0.02)
    costs = cost.costs()
    assert costs is not None
    assert costs.longest_chunk > 0


def test_the_cost_of_tiles_is_learned() -> None:
    model, rng = StepCost(QUANTIZED), random.Random(0)

    def seconds(contexts: list[int], tokens: int) -> float:
        rows = QUANTIZED.padded(len(contexts) + tokens)
        return FAST_GPU.step_seconds(contexts) + 0.001 * (rows - len(contexts))

    for _ in range(40):
        contexts, tokens = [500] * rng.randrange(1, 17), rng.randrange(1, 200)
        model.observe(contexts, [(0, tokens)], seconds(contexts, tokens))
        model.observe(contexts, [], FAST_GPU.step_seconds(contexts))
    model.costs()
    for rows, tokens in ((1, 31), (1, 32), (16, 17), (16, 48)):
        estimate = model.estimate([500] * rows, [(0, tokens)])
        assert estimate == pytest.approx(seconds([500] * rows, tokens), rel=0.02)


@pytest.mark.parametrize(
    ("tiles", "milliseconds", "expected"),
    [
        (QUANTIZED, {1: 14, 32: 29, 33: 57, 64: 57, 128: 111}, RowTiles(32, 32)),
        (RowTiles(64), {1: 14, 32: 29, 33: 57, 64: 57, 128: 111}, RowTiles(32, 32)),
        (QUANTIZED, {1: 14, 32: 29, 33: 29, 64: 30, 128: 60}, RowTiles(64, 64)),
        (QUANTIZED, {1: 14, 32: 20, 33: 20.2, 64: 26, 128: 38}, RowTiles(1, 32)),
        (RowTiles(32, 128), {1: 14, 32: 29, 33: 57, 64: 57, 128: 111}, RowTiles(32, 32)),
        (QUANTIZED, {1: 8, 32: 36, 33: 52, 64: 54, 128: 58}, RowTiles(32, 128)),
        (RowTiles(32, 128), {1: 8, 32: 36, 33: 60, 64: 62}, RowTiles(32, 128)),
        (QUANTIZED, {1: 14, 32: 29, 33: 36, 64: 57, 128: 111}, RowTiles(32, 32)),
        (QUANTIZED, {1: 14, 32: 29, 33: 57}, QUANTIZED),
        (ANY_ROWS, {1: 14, 32: 29, 33: 57, 64: 57, 128: 111}, ANY_ROWS),
    ],
    ids=[
        *("tiles of 32", "smaller than thought", "larger than thought", "none", "no least chunk"),
        *("experts", "too few rows timed", "not clear", "not timed", "a CPU"),
    ],
)
def test_tiles_and_least_chunks_are_measured_where_the_times_are_clear(
    tiles: RowTiles, milliseconds: dict[int, float], expected: RowTiles
) -> None:
    assert tiles.measured(milliseconds) == expected


def test_the_scheduler_cuts_chunks_by_the_tiles_that_were_measured() -> None:
    """They are known to have 64 rows, and have 32."""
    timed = TimedScheduler(FAST_GPU, tiles=RowTiles(64))
    timed.scheduler.times.learn_rows({rows: rows_of_a_gpu(rows) for rows in (1, 32, 33, 64, 128)})
    timed.seconds = lambda contexts, chunks: rows_of_a_gpu(  # type: ignore[method-assign]
        len(contexts) + sum(tokens for _, tokens in chunks)
    )
    timed.add(sequence(1, 20, max_tokens=5000), sequence(2, 300, max_tokens=1))
    while timed.scheduler.waiting or len(timed.scheduler.running) > 1:
        timed.step()
    timed.add(sequence(3, 1000, max_tokens=1))
    rows = [timed.last.num_tokens for _ in range(5) if timed.step()]
    assert all(count % 32 == 0 for count in rows if count > 1)
    assert {count % 64 for count in rows} >= {32}
