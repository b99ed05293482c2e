"""The scheduler of a model with recurrent layers: where rows start, and which states are kept."""

from __future__ import annotations

from mlxpaged.scheduler.config import SchedulerConfig
from mlxpaged.scheduler.scheduler import Scheduler
from mlxpaged.scheduler.sequence import FinishReason, Priority, Sequence, SequenceStatus
from mlxpaged.step import Step

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
    assert scheduler.blocks.swap is not None
    first = sequence(0, *range(10, 19))
    scheduler.add(first)
    run_step(scheduler)
    assert scheduler.blocks.swap_out(first)
    moves = scheduler.blocks.take_moves()
    assert len(moves.swap_out) == 3
    assert [(number, len(slots)) for number, slots in moves.states_out] == [(0, 3)]
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
