"""Junctions: a checkpoint is worth its memory where other prompts part from a prompt."""

from __future__ import annotations

from typing import Any

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.block_table import BlockTable
from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.blocks.table_rows import TableRows
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.junctions import Junctions
from mlxpaged.core.scheduling.scheduler import Scheduler
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import Step

SIZE = 4


def make() -> tuple[BlockPool[Any], PrefixCache, Junctions]:
    pool: BlockPool[Any] = BlockPool(64, SIZE)
    cache = PrefixCache(pool)
    return pool, cache, Junctions(cache, SIZE)


def sequence(number: int, *tokens: int) -> Sequence:
    return Sequence(number, list(tokens), 8)


def junctions_of(junctions: Junctions, each: Sequence) -> list[int]:
    """The positions at which other prompts part from it."""
    return [(i + 1) * SIZE for i, key in enumerate(each.kv.keys) if key in junctions]


PREFIX = range(10, 18)
"""Two blocks."""


def test_a_prompt_alone_has_no_junction() -> None:
    _, _, junctions = make()
    alone = sequence(0, *PREFIX, 1, 2, 3)
    junctions.add(alone)
    assert junctions_of(junctions, alone) == []


def test_prompts_part_at_the_last_block_that_they_share() -> None:
    _, _, junctions = make()
    first, second = sequence(0, *PREFIX, 1, 2, 3, 4, 5), sequence(1, *PREFIX, 5, 6, 7, 8, 9)
    junctions.add(first)
    junctions.add(second)
    assert junctions_of(junctions, first) == junctions_of(junctions, second) == [8]


def test_a_third_prompt_can_part_elsewhere() -> None:
    _, _, junctions = make()
    first = sequence(0, *PREFIX, 1, 2, 3, 4, 5)
    for each in (first, sequence(1, *PREFIX, 5, 6, 7, 8, 9), sequence(2, *PREFIX[:4], 9, 9, 9, 9, 9)):
        junctions.add(each)
    assert junctions_of(junctions, first) == [4, 8]


def test_the_block_of_the_last_token_is_never_shared() -> None:
    """It is always computed, for the logits."""
    _, _, junctions = make()
    first, second = sequence(0, *PREFIX), sequence(1, *PREFIX)
    junctions.add(first)
    junctions.add(second)
    assert junctions_of(junctions, second) == [4]


def test_a_prompt_parts_from_the_cached_blocks_of_ended_ones() -> None:
    pool, cache, junctions = make()
    table, ended = BlockTable(pool, TableRows(), cache), sequence(0, *PREFIX, 1, 2, 3, 4)
    cache.extend_keys(ended.kv.keys, ended.token_ids, 12)
    table.grow(12)
    table.publish(ended.token_ids, 12, ended.kv.keys)
    table.release()
    new = sequence(1, *PREFIX, 5, 6, 7, 8, 9)
    junctions.add(new)
    assert junctions_of(junctions, new) == [8]


def test_a_junction_ends_with_the_prompt_that_made_it() -> None:
    _, _, junctions = make()
    first, second, third = (sequence(i, *PREFIX, i, i, i, i, i) for i in range(3))
    for each in (first, second, third):
        junctions.add(each)
    junctions.remove(second)
    assert junctions_of(junctions, first) == [8], "the third one parts there too"
    junctions.remove(third)
    assert junctions_of(junctions, first) == []
    junctions.remove(first)
    fourth = sequence(3, *PREFIX, 9)
    junctions.add(fourth)
    assert junctions_of(junctions, fourth) == []


def run_step(scheduler: Scheduler) -> Step:
    batch = scheduler.schedule()
    scheduler.update(batch, {row.sequence_id: [1] for row in batch.rows if row.samples})
    return batch


def test_checkpoints_are_taken_at_junctions_and_at_the_last_whole_block_of_a_prompt() -> None:
    config = SchedulerConfig(num_blocks=64, block_size=SIZE, recurrent=True, num_checkpoints=8)
    scheduler = Scheduler(config)
    scheduler.add(sequence(0, *PREFIX, *range(20, 34)))
    scheduler.add(sequence(1, *PREFIX, *range(40, 54)))
    first, second = run_step(scheduler).rows
    assert [position for position, _ in first.checkpoints] == [8, 20]
    assert [position for position, _ in second.checkpoints] == [20]
    assert second.start == 8
    assert second.restore == first.checkpoints[0][1]
    scheduler.add(sequence(2, *PREFIX, *range(20, 34), 7))
    rows = [row for row in run_step(scheduler).rows if row.sequence_id == 2]
    assert [(row.start, row.restore) for row in rows] == [(20, first.checkpoints[1][1])]


def test_a_prompt_whose_shared_blocks_have_no_checkpoint_computes_them_and_takes_one_there() -> None:
    """The prompts after it start there."""
    config = SchedulerConfig(num_blocks=64, block_size=SIZE, recurrent=True, num_checkpoints=8)
    scheduler = Scheduler(config)
    scheduler.add(sequence(0, *PREFIX, *range(20, 34)))
    run_step(scheduler)
    starts = []
    for number in (1, 2):
        scheduler.add(sequence(number, *PREFIX, *range(100 * number, 100 * number + 9)))
        [row] = (row for row in run_step(scheduler).rows if row.sequence_id == number)
        starts.append((row.start, [position for position, _ in row.checkpoints]))
    assert starts == [(0, [8, 16]), (8, [16])]
