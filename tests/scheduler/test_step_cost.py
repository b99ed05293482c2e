"""The cost model of a step, and the chunks of prompts that the scheduler cuts by it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import astuple
from types import MappingProxyType
from typing import Any

import pytest

from mlxpaged.core.scheduling.config import MOST_MULTIPLE, READING_SECONDS, SchedulerConfig, step_multiple
from mlxpaged.core.scheduling.row_table import RowTimes
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, LEAST_CHUNK, RowTiles
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.step_cost import EXTRAPOLATION, KEPT, OUTLIER, Costs, StepCost
from mlxpaged.core.step import Step
from tests.scheduler.simulation import commit, make_scheduler, sequence

SLOW_CPU = Costs(0.05, 0.002, 1e-6, 0.002, 8e-7)
"""An 80 M model on two cores."""
FAST_GPU = Costs(0.01, 1e-4, 1e-8, 0.0012, 1e-8)
MACHINES = pytest.mark.parametrize("machine", [SLOW_CPU, FAST_GPU], ids=["slow CPU", "fast GPU"])


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


# -- the scheduler cuts chunks by it ---------------------------------------------------------------------------------


class TimedScheduler:
    """Every step takes what the machine's costs say, and the scheduler hears of it."""

    def __init__(self, machine: Costs, **options: Any) -> None:
        settings: dict[str, Any] = {
            "num_blocks": 4000,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 8192,
            "decode_preference": 0.0,
        }
        self.scheduler = make_scheduler(**(settings | options))
        self.machine = machine
        self.last = Step(())

    def seconds(self, contexts: list[int], chunks: list[tuple[int, int]]) -> float:
        return self.machine.step_seconds(contexts, chunks)

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one)

    def step(self) -> float:
        self.last = self.scheduler.schedule()
        contexts = [row.context_len for row in self.last.rows if row.num_tokens == 1]
        chunks = [(row.start, row.num_tokens) for row in self.last.rows if row.num_tokens > 1]
        seconds = self.seconds(contexts, chunks)
        tokens = {row.sequence_id: 1 for row in self.last.rows if row.samples}
        self.scheduler.times.observe(self.last, seconds)
        commit(self.scheduler, self.last, tokens)
        return seconds


def with_streams(
    machine: Costs, count: int = 8, timed_rows: Mapping[int, float] = MappingProxyType({}), **options: Any
) -> TimedScheduler:
    """Streams decode, and the machine is known. timed_rows: seconds by rows, measured before."""
    timed = TimedScheduler(machine, **options)
    timed.scheduler.times.learn_rows(timed_rows)
    timed.add(*(sequence(number, 20 + 10 * number, max_tokens=5000) for number in range(count)))
    for number in range(100, 104):
        for _ in range(4):
            timed.step()
        timed.add(sequence(number, 50 * (number - 97), max_tokens=4))
    while timed.scheduler.waiting or len(timed.scheduler.running) > count:
        timed.step()
    return timed


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


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="max_step_seconds must be at least 0 and finite"):
        SchedulerConfig(num_blocks=8, max_step_seconds=seconds)


# -- tiles of rows -----------------------------------------------------------------------------------------------------

QUANTIZED, MIXTURE = RowTiles(32), RowTiles(32, 128)


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


# -- the table by rows -------------------------------------------------------------------------------------------------


def rows_of_a_gpu(rows: int) -> float:
    """Reads the weights again for each of the first rows, and computes more of them in tiles of 32."""
    return 0.01 * rows if rows <= 6 else 0.06 * -(-rows // 32)


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
