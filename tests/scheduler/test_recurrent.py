"""The scheduler of a model with recurrent layers: where rows start, and which states are kept."""

from __future__ import annotations

import pytest

from mlxpaged.core.scheduling import recurrent
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.core.step import Step

SIZE = 4


def make(num_blocks: int = 64, num_checkpoints: int = 8, **options: object) -> Scheduler:
    config = {"block_size": SIZE, "recurrent": True, "num_checkpoints": num_checkpoints} | options
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, **config))  # type: ignore[arg-type]


def sequence(number: int, *tokens: int, priority: Priority = Priority.NORMAL) -> Sequence:
    return Sequence(number, list(tokens), 8, priority=priority)


def run_step(scheduler: Scheduler) -> Step:
    batch = scheduler.schedule()
    scheduler.update(batch, {row.sequence_id: [1] for row in batch.rows if row.samples})
    return batch


def test_a_sequence_that_has_not_read_its_checkpoint_yet_is_not_swapped_out() -> None:
    """Its state is not that of its last computed token."""
    scheduler = make(num_swap_slots=32, swap_slots_per_state=1)
    prompt = range(10, 30)
    scheduler.add(sequence(0, *prompt))
    run_step(scheduler)
    blocks, second = scheduler.blocks, sequence(1, *prompt)
    second.num_computed_tokens = blocks.start(second, blocks.find(second))
    assert second.num_computed_tokens == 16
    assert not blocks.swap_out(second)
    blocks.states.take_restore(second)
    assert blocks.swap_out(second)


def test_a_swapped_sequence_keeps_slots_for_its_state() -> None:
    scheduler = make(num_swap_slots=10, swap_slots_per_state=3)
    first = sequence(0, *range(10, 19))
    scheduler.add(first)
    run_step(scheduler)
    assert scheduler.blocks.swap_out(first)
    moves = scheduler.blocks.take_moves()
    assert len(moves.swap_out) == 3
    assert [(number, len(slots)) for number, _, slots in moves.states_out] == [(0, 3)]
    assert scheduler.blocks.swap.usage().used == 6
    scheduler.blocks.drop_swapped(first)
    assert scheduler.blocks.swap.usage().used == 0


def test_a_running_prompt_goes_on_from_a_checkpoint_that_another_one_took_further_on() -> None:
    """Both are computed in chunks, the first one in larger ones."""
    scheduler = make(max_num_batched_tokens=32, max_num_seqs=4)
    prompt = list(range(10, 70))
    ahead, behind = sequence(0, *prompt, 1), sequence(1, *prompt, 2)
    scheduler.add(ahead)
    run_step(scheduler)
    scheduler.add(behind)
    rows = [row for _ in range(3) for row in run_step(scheduler).rows if row.sequence_id == 1]
    assert [(row.start, row.num_tokens) for row in rows[:1]] == [(60, 1)]
    assert rows[0].restore is not None


def test_a_failed_step_takes_its_checkpoints_and_those_who_started_from_them_along() -> None:
    scheduler = make()
    prompt = range(10, 30)
    first, second = sequence(0, *prompt, 1), sequence(1, *prompt, 2)
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert [row.start for row in batch.rows] == [0, 20]
    assert scheduler.fail(0) == [second]
    assert second.status is SequenceStatus.PREEMPTED
    checkpoints = scheduler.blocks.states.checkpoints
    assert len(checkpoints) == checkpoints.num_reserved == 0
    scheduler.update(batch, {})
    [row] = scheduler.schedule().rows
    assert (row.sequence_id, row.start, row.restore) == (1, 0, None)


def test_without_checkpoints_nothing_is_reused() -> None:
    scheduler = make(num_checkpoints=0)
    prompt = range(10, 30)
    for number in range(2):
        scheduler.add(sequence(number, *prompt))
    assert [(row.start, row.num_tokens) for row in run_step(scheduler).rows] == [(0, 20), (0, 20)]


def test_an_evicted_block_takes_its_checkpoint_along() -> None:
    scheduler = make(num_blocks=16)
    scheduler.add(sequence(0, *range(10, 30)))
    while scheduler.has_unfinished():
        batch = run_step(scheduler)
        for row in batch.rows:
            if scheduler.sequences[row.sequence_id].num_output_tokens == 8:
                scheduler.finish(row.sequence_id, FinishReason.LENGTH)
    checkpoints = scheduler.blocks.states.checkpoints
    assert len(checkpoints) == 1
    scheduler.pool.allocate(16)
    assert len(checkpoints) == checkpoints.num_reserved == 0


def test_blocks_that_the_prefix_cache_has_dropped_get_no_checkpoints() -> None:
    """No prompt could find them, and nothing but newer checkpoints would replace them."""
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(sequence(0, *range(10, 60)))
    run_step(scheduler)
    assert scheduler.prefix_cache is not None
    scheduler.prefix_cache.clear()
    run_step(scheduler)
    scheduler.finish(0, FinishReason.ABORT)
    checkpoints = scheduler.blocks.states.checkpoints
    assert len(checkpoints) == checkpoints.num_reserved == 0


def test_no_row_with_drafts_reaches_a_position_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draft before it would leave a checkpoint of another state."""
    monkeypatch.setattr(recurrent, "CHECKPOINT_DISTANCE", 8)
    scheduler, found = make(), []
    drafting = Sequence(0, list(range(10, 15)), 40)
    scheduler.add(drafting)
    run_step(scheduler)
    while drafting.num_computed_tokens < 24:
        drafting.drafts = [1] * 8
        step = scheduler.schedule()
        [row] = step.rows
        found.append((row.start, row.num_tokens, [position for position, _ in row.checkpoints]))
        scheduler.update(step, {0: [1] * row.num_sampled})
    assert found == [(5, 2, []), (7, 1, [8]), (8, 7, []), (15, 1, [16]), (16, 7, []), (23, 1, [24])]
    scheduler.finish(0, FinishReason.STOP)
    assert scheduler.blocks.states.checkpoints.num_reserved == 0


def test_a_row_that_fills_the_block_after_which_other_prompts_part_has_no_drafts() -> None:
    scheduler = make(max_num_seqs=1)
    first = Sequence(0, list(range(10, 16)), 40)
    scheduler.add(first)
    run_step(scheduler)
    for number in (1, 2):
        scheduler.add(sequence(number, *range(10, 16), 1, 2, 30 + number, 5))
    rows = []
    for sampled in (2, 3, 4):
        first.drafts = [7, 7]
        step = scheduler.schedule()
        rows += [(row.start, row.num_tokens, [position for position, _ in row.checkpoints]) for row in step.rows]
        scheduler.update(step, {0: [sampled]})
    assert rows == [(6, 3, []), (7, 1, [8]), (8, 3, [])]


def test_rows_with_as_many_drafts_are_neighbours() -> None:
    scheduler = make()
    sequences = [sequence(number, 10 + number, 11, 12) for number in range(5)]
    for each in sequences:
        scheduler.add(each)
    run_step(scheduler)
    for each, count in zip(sequences, (2, 0, 4, 2, 0), strict=True):
        each.drafts = [1] * count
    step = scheduler.schedule()
    assert [(row.sequence_id, row.num_tokens) for row in step.rows] == [(1, 1), (4, 1), (0, 3), (3, 3), (2, 5)]
    assert [row.token_ids[0] for row in step.rows] == [1] * 5
